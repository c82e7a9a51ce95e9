// Values that this browser keeps. A browser may forbid storage; then nothing is kept and the page works all the same.

/** Return the value under `name`, or null. */
export function load(storage, name) {
  try {
    return window[storage].getItem(`vllm_mp.${name}`);
  } catch {
    return null;
  }
}

/** Keep `value` under `name`; null removes it. `storage` is "sessionStorage" or "localStorage". */
export function save(storage, name, value) {
  try {
    if (value === null) window[storage].removeItem(`vllm_mp.${name}`);
    else window[storage].setItem(`vllm_mp.${name}`, value);
  } catch {
    // Storage is forbidden or full.
  }
}
