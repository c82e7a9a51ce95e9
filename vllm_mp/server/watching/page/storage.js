// Values that this browser keeps. A browser may forbid storage; then nothing is kept and the page works all the same.

const PREFIX = "vllm_mp.";

/** Return the value under `name`, or null. */
export function load(storage, name) {
  try {
    return window[storage].getItem(PREFIX + name);
  } catch {
    return null;
  }
}

/** Keep `value` under `name` and return whether that worked; null removes it. `storage` is "sessionStorage" or "localStorage". */
export function save(storage, name, value) {
  try {
    if (value === null) window[storage].removeItem(PREFIX + name);
    else window[storage].setItem(PREFIX + name, value);
    return true;
  } catch {
    return false; // Storage is forbidden or full.
  }
}

/** Return the names under which values are kept that begin with `start`. */
export function names(storage, start) {
  try {
    const all = Object.keys(window[storage]).filter((key) => key.startsWith(PREFIX + start));
    return all.map((key) => key.slice(PREFIX.length));
  } catch {
    return [];
  }
}

/** Call `onChange(name)` when another tab changes a value of localStorage; the name is null if it removed all values. */
export function onOtherTab(onChange) {
  window.addEventListener("storage", ({ storageArea, key }) => {
    if (storageArea === window.localStorage && (key === null || key.startsWith(PREFIX))) onChange(key?.slice(PREFIX.length) ?? null);
  });
}
