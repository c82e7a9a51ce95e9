// What runs now: readings, plots, latency and restarts, from the snapshots of the feed.

import { Plot } from "./plots.js";
import { clock, counted, duration, latency, number, percent } from "./units.js";

const STATES = {
  running: "Running",
  loading: "Loading",
  restarting: "Restarting",
  paused: "Paused",
  asleep: "Asleep",
  draining: "Shutting down",
  "left out": "Left out",
  dead: "Stopped",
  offline: "Offline",
};

const byId = (id) => document.getElementById(id);

export class Dashboard {
  constructor() {
    this.hasStopped = false; // The latest snapshot said that the engine is gone for good.
    const plot = (id) => document.querySelector(`#${id} .plot`);
    this.plots = [
      new Plot(plot("throughput"), {
        label: "Output tokens per second over the last five minutes",
        series: [{ name: "Output", value: (snapshot) => snapshot.output_tokens_per_s }],
        format: number,
        unit: " tokens/s",
        smallestTop: 10,
      }),
      new Plot(plot("streams"), {
        label: "Streams over the last five minutes",
        series: [
          { name: "Running", value: (snapshot) => snapshot.num_running },
          { name: "Waiting", value: (snapshot) => snapshot.num_waiting },
        ],
        format: number,
        smallestTop: 4,
        wholeTicks: true,
      }),
      new Plot(plot("first-token"), {
        label: "Time to first token over the last five minutes",
        series: [
          { name: "p50", value: (snapshot) => snapshot.time_to_first_token?.p50 },
          { name: "p95", value: (snapshot) => snapshot.time_to_first_token?.p95 },
        ],
        format: latency,
        smallestTop: 0.02,
      }),
      new Plot(plot("kv-cache"), {
        label: "Share of the KV cache in use over the last five minutes",
        series: [{ name: "In use", value: (snapshot) => snapshot.kv_cache_usage }],
        format: (share) => `${percent(share)} %`,
        top: 1,
      }),
    ];
  }

  /** Show the facts that do not change while the server runs. */
  showFacts({ model, max_model_len, version }) {
    byId("model").textContent = byId("model").title = model;
    byId("model-facts").textContent = `Context ${max_model_len.toLocaleString("en")} tokens`;
    byId("version").textContent = `vllm_mp ${version}`;
    document.title = `${model} · vllm_mp`;
  }

  /** Show a snapshot, the latest of `history`. */
  show(snapshot, history) {
    showState(snapshot.state);
    this.hasStopped = snapshot.state === "dead";
    document.body.classList.toggle("is-stale", snapshot.state === "restarting" || snapshot.state === "dead");
    setText(byId("core-facts"), `${coreName(snapshot.incarnation)} · up ${duration(snapshot.uptime_s)}`);
    showReadings("throughput", {
      output: `${number(snapshot.output_tokens_per_s)} tokens/s`,
      prompt: `${number(snapshot.prompt_tokens_per_s)} tokens/s`,
      drafts: `${percent(snapshot.accepted_drafts ?? 0)} %`,
    });
    byId("drafts").hidden = snapshot.accepted_drafts === null;
    showReadings("streams", { running: number(snapshot.num_running), waiting: number(snapshot.num_waiting) });
    showReadings("first-token", {
      p50: latency(snapshot.time_to_first_token?.p50),
      p95: latency(snapshot.time_to_first_token?.p95),
    });
    showReadings("kv-cache", { usage: `${percent(snapshot.kv_cache_usage)} %` });
    showLatency(snapshot);
    showCores(snapshot);
    showRestarts(snapshot);
    showBannerOf(snapshot);
    const restarts = snapshot.restarts.map(({ time, recovery_s }) => ({
      time,
      end: recovery_s === null ? null : time + recovery_s,
    }));
    for (const plot of this.plots) plot.draw(history, restarts);
  }

  /** Show that the server has not loaded the model yet. */
  showLoading() {
    showState("loading");
    byId("banner").hidden = true;
  }

  /** Show that there is no connection to the server. If the engine had stopped, its cause is of more use. */
  showLost(message) {
    showState("offline");
    document.body.classList.add("is-stale");
    if (!this.hasStopped) showBanner("bad", "No connection.", `${message} Trying again.`);
  }
}

function showState(state) {
  byId("state").dataset.state = state;
  setText(byId("state").firstElementChild, STATES[state] ?? state);
}

/** Return the name of a core. The incarnation of a stand-alone core is the moment of its parent's start, in milliseconds, plus
 * the number of cores since. */
function coreName(incarnation) {
  return incarnation < 1e12 ? `Core ${incarnation}` : `Core of ${clock(incarnation / 1e3)}`;
}

function showBannerOf({ state, cause, num_live }) {
  if (state === "restarting") {
    const streams = num_live ? `${counted(num_live, "stream")} will continue. ` : "";
    showBanner("warn", "The engine is restarting.", `${streams}Cause: ${cause}`);
  } else if (state === "dead") {
    showBanner("bad", "The engine has stopped.", `Cause: ${cause}`);
  } else {
    byId("banner").hidden = true;
  }
}

function showBanner(kind, title, words) {
  const banner = byId("banner");
  banner.dataset.kind = kind;
  banner.hidden = false;
  setText(banner.firstElementChild, title);
  setText(banner.lastElementChild, words);
}

function showReadings(id, texts) {
  for (const [name, words] of Object.entries(texts)) {
    const [value, unit] = words.split(" ");
    const number = document.createElement("b");
    number.textContent = value;
    document.querySelector(`#${id} [data-value=${name}]`).replaceChildren(number, unit ? ` ${unit}` : "");
  }
}

function showLatency(snapshot) {
  for (const row of byId("latency").tBodies[0].rows) {
    const percentiles = snapshot[row.dataset.latency];
    ["p50", "p95", "p99"].forEach((name, index) => setText(row.cells[index + 1], latency(percentiles?.[name])));
  }
}

function showCores({ cores }) {
  byId("cores-card").hidden = cores.length === 0;
  const body = byId("cores").tBodies[0];
  while (body.rows.length > cores.length) body.deleteRow(-1);
  cores.forEach((core, index) => {
    const row = body.rows[index] ?? coreRow(body);
    const texts = [STATES[core.state] ?? core.state, number(core.num_running), number(core.num_waiting)];
    setText(row.cells[0], core.node ? `Core ${core.rank}, ${core.node}` : `Core ${core.rank}`);
    [...texts, `${percent(core.kv_cache_usage)} %`].forEach((words, cell) => setText(row.cells[cell + 1], words));
  });
}

function coreRow(body) {
  const row = body.insertRow();
  const head = document.createElement("th");
  head.scope = "row";
  row.append(head);
  for (let cell = 0; cell < 4; cell++) row.insertCell();
  return row;
}

function showRestarts({ restarts }) {
  byId("no-restarts").hidden = restarts.length > 0;
  const key = JSON.stringify(restarts);
  const list = byId("restarts");
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...restarts.toReversed().map(restartItem));
}

function restartItem({ time, cause, recovery_s, num_recovered }) {
  const item = document.createElement("li");
  const when = document.createElement("time");
  when.dateTime = new Date(1000 * time).toISOString();
  when.textContent = clock(time);
  const result = document.createElement("span");
  result.className = "result";
  result.textContent =
    recovery_s === null ? "restarting…" : `back in ${latency(recovery_s)} · ${counted(num_recovered, "stream")} recovered`;
  const why = document.createElement("p");
  why.textContent = cause;
  item.append(when, result, why);
  return item;
}

/** Change a text only if it differs, so that a screen reader announces nothing twice. */
function setText(element, words) {
  if (element.textContent !== words) element.textContent = words;
}
