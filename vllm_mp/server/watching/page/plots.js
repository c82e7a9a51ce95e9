// Line plots of the last minutes as inline SVG. Colours come from the style sheet.

import { clock } from "./units.js";

const SPAN_S = 300;
const MAX_GAP_S = 3; // Points further apart are not joined.
const HEIGHT = 140;
const MARGIN = { top: 8, right: 8, bottom: 20, left: 52 };
const SVG = "http://www.w3.org/2000/svg";

export class Plot {
  /**
   * `series` is a list of {name, value}, where `value(snapshot)` is a number or null; the first is filled.
   * `format` makes the text of a value, and `unit` follows it away from the axis. `smallestTop` is the least upper end
   * of the axis; `top` fixes it.
   */
  constructor(container, { label, series, format, unit = "", smallestTop = 1, top = null, wholeTicks = false }) {
    Object.assign(this, { container, series, format, unit, smallestTop, top, wholeTicks });
    this.view = { history: [], restarts: [] };
    this.svg = create("svg", { role: "img", "aria-label": label, height: HEIGHT });
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    container.append(this.svg, this.tip);
    new ResizeObserver(() => this.render()).observe(container);
    container.addEventListener("pointermove", (event) => this.point(event));
    container.addEventListener("pointerleave", () => this.point(null));
    container.addEventListener("pointercancel", () => this.point(null));
  }

  /** Show `history`, a list of snapshots, and the restarts of the core, a list of {time, end}. */
  draw(history, restarts) {
    this.view = { history, restarts };
    this.render();
  }

  render() {
    const { history, restarts } = this.view;
    const width = this.container.clientWidth;
    if (width === 0) return;
    const now = history.at(-1)?.time ?? 0;
    const shown = history.filter((snapshot) => snapshot.time >= now - SPAN_S);
    const plotWidth = width - MARGIN.left - MARGIN.right;
    const plotHeight = HEIGHT - MARGIN.top - MARGIN.bottom;
    const largest = Math.max(0, ...shown.flatMap((snapshot) => this.series.map(({ value }) => value(snapshot) ?? 0)));
    const step = this.top === null ? tickStep(Math.max(largest, this.smallestTop), this.wholeTicks) : this.top / 2;
    const top = this.top ?? step * Math.max(2, Math.ceil(largest / step));
    const x = (time) => MARGIN.left + plotWidth * (1 - (now - time) / SPAN_S);
    const y = (value) => MARGIN.top + plotHeight * (1 - value / top);
    this.scale = { x, y, now, shown, plotWidth };

    const parts = [];
    for (let tick = 0; tick <= top * 1.001; tick += step) {
      parts.push(create("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }));
      parts.push(text(tick === 0 ? "0" : this.format(tick), { class: "tick", x: MARGIN.left - 8, y: y(tick) + 4, "text-anchor": "end" }));
    }
    for (const minutes of [5, 4, 3, 2, 1]) {
      const anchor = minutes === 5 ? "start" : "middle";
      const words = minutes === 5 ? "5 min ago" : `${minutes}`;
      if (minutes === 4 && plotWidth < 360) continue; // It would touch its neighbour in some fonts.
      parts.push(text(words, { class: "tick", x: x(now - 60 * minutes), y: HEIGHT - 4, "text-anchor": anchor }));
    }
    parts.push(text("now", { class: "tick", x: width - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end" }));
    for (const { time, end } of restarts) {
      if ((end ?? now) < now - SPAN_S) continue;
      const left = x(Math.max(time, now - SPAN_S));
      const right = Math.max(left + 2, x(end ?? now));
      const title = create("title");
      title.textContent = `Core restarted at ${clock(time)}`;
      const band = create("rect", { class: "restart", x: left, y: MARGIN.top, width: right - left, height: plotHeight });
      band.append(title);
      parts.push(band);
    }
    for (const [index, { value }] of [...this.series.entries()].reverse()) {
      for (const run of runs(shown, value)) {
        const line = run.map(([time, each]) => `${x(time).toFixed(1)},${y(each).toFixed(1)}`).join(" ");
        if (index === 0) {
          const [first, last] = [x(run[0][0]).toFixed(1), x(run.at(-1)[0]).toFixed(1)];
          parts.push(create("polygon", { class: "area series-1", points: `${first},${y(0)} ${line} ${last},${y(0)}` }));
        }
        parts.push(create("polyline", { class: `curve series-${index + 1}`, points: line }));
      }
    }
    this.cursor = create("line", { class: "cursor", y1: MARGIN.top, y2: MARGIN.top + plotHeight, visibility: "hidden" });
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts, this.cursor);
    if (this.pointerX !== undefined) this.showTip();
  }

  point(event) {
    this.pointerX = event === null ? undefined : event.clientX - this.container.getBoundingClientRect().left;
    this.showTip();
  }

  showTip() {
    const snapshot = this.snapshotAt(this.pointerX);
    this.tip.hidden = snapshot === null;
    this.cursor?.setAttribute("visibility", snapshot === null ? "hidden" : "visible");
    if (snapshot === null) return;
    const left = this.scale.x(snapshot.time);
    this.cursor.setAttribute("x1", left);
    this.cursor.setAttribute("x2", left);
    const rows = this.series.map(({ name, value }) => `${name} ${this.format(value(snapshot))}${this.unit}`);
    this.tip.textContent = [clock(snapshot.time), ...rows].join("\n");
    const isRight = left > this.container.clientWidth / 2;
    this.tip.style.left = isRight ? "" : `${left + 8}px`;
    this.tip.style.right = isRight ? `${this.container.clientWidth - left + 8}px` : "";
  }

  /** Return the snapshot nearest to a horizontal position, or null. */
  snapshotAt(position) {
    if (position === undefined || !this.scale?.shown.length) return null;
    const { x, shown, plotWidth } = this.scale;
    const distance = (snapshot) => Math.abs(x(snapshot.time) - position);
    const nearest = shown.reduce((best, each) => (distance(each) < distance(best) ? each : best));
    return distance(nearest) <= plotWidth / 20 ? nearest : null;
  }
}

/** Return the distance of two ticks, so that two or three of them reach `top`. */
function tickStep(top, isWhole) {
  const raw = top / 2;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= raw * 0.999);
  return isWhole ? Math.max(1, Math.ceil(step)) : step;
}

/** Return lists of [time, value]: the parts of a curve between gaps and missing values. */
function runs(snapshots, value) {
  const found = [];
  let last = -Infinity;
  for (const snapshot of snapshots) {
    const each = value(snapshot);
    if (each === null || each === undefined) {
      last = -Infinity;
      continue;
    }
    if (snapshot.time - last > MAX_GAP_S) found.push([]);
    found.at(-1).push([snapshot.time, each]);
    last = snapshot.time;
  }
  return found;
}

function create(name, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function text(words, attributes) {
  const element = create("text", attributes);
  element.textContent = words;
  return element;
}
