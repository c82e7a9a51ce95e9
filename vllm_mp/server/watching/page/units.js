// Numbers and times as text.

const MISSING = "–";

/** Return a rate or count with at most three digits: 8.4, 132, 1.25k. */
export function number(value) {
  if (value === null || value === undefined) return MISSING;
  if (value >= 1e6) return `${trim(value / 1e6)}M`;
  if (value >= 1e4) return `${trim(value / 1e3)}k`;
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

/** Return a duration of a measurement: 8.4 ms, 132 ms, 1.25 s. */
export function latency(seconds) {
  if (seconds === null || seconds === undefined) return MISSING;
  if (seconds >= 0.9995) return `${trim(seconds)} s`;
  const ms = 1000 * seconds;
  return `${ms >= 10 || ms === 0 ? Math.round(ms) : ms.toFixed(1)} ms`;
}

/** Return a long duration: 12 s, 5 min, 3 h 20 min, 2 d 4 h. */
export function duration(seconds) {
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Return a percentage without its sign: 0, 0.4, 37. */
export function percent(share) {
  if (share === null || share === undefined) return MISSING;
  const value = 100 * share;
  return value < 0.05 || value >= 10 ? String(Math.round(value)) : value.toFixed(1);
}

/** Return the time of day of `time`, in seconds since 1970. */
export function clock(time) {
  return new Date(1000 * time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

/** Return `count` with the noun, in the plural if needed. */
export function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

function trim(value) {
  return value >= 100 ? String(Math.round(value)) : value.toPrecision(3).replace(/\.?0+$/, "");
}
