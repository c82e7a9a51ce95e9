// The chat: a conversation whose answers stream, can be stopped, and say how fast they were.

import { readEvents, request } from "./api.js";
import { showText } from "./formatting.js";
import { load, save } from "./storage.js";
import { counted, latency, number } from "./units.js";

const SETTINGS = "settings";
const DEFAULTS = { system: "", tools: "", temperature: "", max_tokens: "512" };
const COPIED_MS = 1500;

const byId = (id) => document.getElementById(id);

export class Chat {
  /** `askForKey(isRefused)` returns when there is a new API key. */
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.model = null;
    this.incarnation = null;
    this.turns = [];
    this.answering = null; // The turn whose answer streams.
    this.conversation = byId("conversation");
    this.list = byId("turns");
    this.message = byId("message");
    this.settings = byId("settings");
    this.restoreSettings();
    this.followEnd();

    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.answering) this.stop();
      else this.send(this.message.value);
    });
    this.message.addEventListener("keydown", (event) => this.onKey(event));
    this.message.addEventListener("input", () => this.fitMessage());
    byId("clear").addEventListener("click", () => this.clear());
    byId("settings-button").addEventListener("click", () => this.showSettings(this.settings.hidden));
    this.settings.addEventListener("input", () => save("sessionStorage", SETTINGS, JSON.stringify(this.fields())));
    this.settings.addEventListener("submit", (event) => event.preventDefault());
    for (const example of byId("welcome").querySelectorAll("button")) {
      example.addEventListener("click", () => this.send(example.textContent));
    }
  }

  /** Mark the answer in progress if the core restarts. */
  note({ state, incarnation }) {
    this.incarnation = incarnation;
    const turn = this.answering;
    if (turn === null) return;
    turn.incarnation ??= incarnation;
    if (state === "restarting") turn.showRestart("The engine restarts; the answer will continue.");
    else if (incarnation !== turn.incarnation) turn.showRestart("The engine restarted; the answer continued.");
  }

  send(words) {
    const prompt = words.trim();
    if (!prompt || this.answering) return;
    if (!this.settings.checkValidity()) {
      this.showSettings(true);
      this.settings.reportValidity();
      return;
    }
    this.message.value = "";
    this.fitMessage();
    const turn = new Turn(prompt, () => this.retry(turn));
    this.turns.push(turn);
    this.isAtEnd = true;
    this.list.append(turn.element);
    byId("welcome").hidden = true;
    byId("clear").hidden = false;
    this.answer(turn);
  }

  async answer(turn) {
    this.answering = turn;
    turn.begin(this.incarnation);
    this.showAnswering();
    try {
      const response = await this.ask(turn);
      for await (const { data } of readEvents(response)) {
        if (data === "[DONE]") break;
        turn.take(JSON.parse(data));
      }
      turn.end(turn.finishReason === null ? "The answer ended early: the connection was lost." : null);
    } catch (error) {
      turn.end(turn.abort.signal.aborted ? null : error.message);
    }
    this.answering = null;
    this.showAnswering();
  }

  /** Return the response that streams the answer of `turn`; ask for an API key if the server wants one. */
  async ask(turn) {
    const { system, tools, temperature, max_tokens } = this.fields();
    const messages = system.trim() ? [{ role: "system", content: system.trim() }] : [];
    for (const each of this.turns) {
      if (each !== turn && !each.text && !each.calls.length) continue; // It failed before its answer began.
      const call = messages.at(-1)?.tool_calls?.[0];
      messages.push(
        call
          ? { role: "tool", tool_call_id: call.id, content: each.prompt } // The message after a call is its result.
          : { role: "user", content: each.prompt },
      );
      if (each === turn) break;
      const calls = each.calls.length ? { tool_calls: each.calls } : {};
      messages.push({ role: "assistant", content: each.text, ...calls });
    }
    const body = { messages, stream: true, stream_options: { include_usage: true } };
    if (tools.trim()) {
      body.tools = parsedTools(tools);
      body.parallel_tool_calls = false;
    }
    if (temperature !== "") body.temperature = Number(temperature);
    if (max_tokens !== "") body.max_completion_tokens = Number(max_tokens);
    for (let isRefused = false; ; isRefused = true) {
      try {
        body.model = this.model ?? (await this.firstModel());
        return await request("v1/chat/completions", { body, signal: turn.abort.signal });
      } catch (error) {
        if (error.status !== 401) throw error;
        await this.askForKey(isRefused);
      }
    }
  }

  async firstModel() {
    return (await (await request("v1/models")).json()).data[0].id;
  }

  stop() {
    this.answering?.abort.abort();
  }

  retry(turn) {
    if (this.answering) return;
    for (const later of this.turns.splice(this.turns.indexOf(turn) + 1)) later.element.remove();
    this.answer(turn);
  }

  clear() {
    this.stop();
    for (const { element } of this.turns) element.remove();
    this.turns = [];
    byId("welcome").hidden = false;
    byId("clear").hidden = true;
    this.message.focus();
  }

  onKey(event) {
    if (event.key === "Escape") this.stop();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send(this.message.value);
  }

  /** Show whether an answer streams. A screen reader waits until the list is no longer busy. */
  showAnswering() {
    const isBusy = this.answering !== null;
    this.list.setAttribute("aria-busy", isBusy);
    byId("composer").classList.toggle("is-answering", isBusy);
    byId("send").setAttribute("aria-label", isBusy ? "Stop" : "Send");
  }

  fitMessage() {
    this.message.style.height = "auto";
    this.message.style.height = `${this.message.scrollHeight}px`;
  }

  /** Keep the end of the conversation in sight, unless the reader has scrolled away from it. */
  followEnd() {
    const view = this.conversation;
    this.isAtEnd = true;
    view.addEventListener("scroll", () => {
      this.isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 24;
    });
    const observer = new ResizeObserver(() => {
      if (this.isAtEnd) view.scrollTop = view.scrollHeight;
    });
    observer.observe(view);
    observer.observe(this.list);
  }

  fields() {
    return Object.fromEntries(new FormData(this.settings));
  }

  showSettings(areShown) {
    this.settings.hidden = !areShown;
    byId("settings-button").setAttribute("aria-expanded", areShown);
  }

  restoreSettings() {
    const kept = JSON.parse(load("sessionStorage", SETTINGS) ?? "{}");
    for (const [name, value] of Object.entries({ ...DEFAULTS, ...kept })) this.settings.elements[name].value = value;
  }
}

/** A message and its answer. */
class Turn {
  constructor(prompt, onRetry) {
    this.prompt = prompt;
    this.element = byId("turn-template").content.firstElementChild.cloneNode(true);
    this.part = (name) => this.element.querySelector(`.${name}`);
    this.part("prompt").textContent = prompt;
    this.part("retry").addEventListener("click", onRetry);
    this.part("copy").addEventListener("click", () => this.copy());
  }

  begin(incarnation) {
    Object.assign(this, { text: "", thought: "", calls: [], numTokens: 0 });
    Object.assign(this, { finishReason: null, firstAt: null, lastAt: null, incarnation });
    this.abort = new AbortController();
    this.startedAt = performance.now();
    this.element.dataset.state = "answering";
    this.part("error-text").hidden = true;
    this.part("restart-mark").hidden = true;
    this.part("stats").textContent = "";
    this.show();
  }

  /** Take in a chunk of the answer. */
  take({ choices = [], usage, error }) {
    if (error) throw new Error(error.message);
    for (const { delta, finish_reason } of choices) {
      if (delta?.content || delta?.reasoning_content || delta?.tool_calls) {
        this.text += delta.content ?? "";
        this.thought += delta.reasoning_content ?? "";
        for (const call of delta.tool_calls ?? []) this.takeCall(call);
        this.numTokens += 1; // An estimate, until the usage is known.
        this.lastAt = performance.now();
        this.firstAt ??= this.lastAt;
      }
      if (finish_reason) this.finishReason = finish_reason;
    }
    if (usage) this.numTokens = usage.completion_tokens;
    this.frame ??= requestAnimationFrame(() => this.show());
  }

  /** Take in what is new of a call: its name first, then its arguments in pieces. */
  takeCall({ index, id, function: { name, arguments: text = "" } }) {
    this.calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
    this.calls[index].function.arguments += text;
  }

  /** End the answer; `error` is a message, or null. */
  end(error) {
    this.element.dataset.state = "done";
    this.part("error-text").hidden = error === null;
    this.part("error-text").textContent = error ?? "";
    this.show();
  }

  show() {
    cancelAnimationFrame(this.frame);
    this.frame = undefined;
    showText(this.part("answer"), this.text);
    this.part("thought").hidden = !this.thought;
    this.part("thought-text").textContent = this.thought;
    this.part("calls").hidden = !this.calls.length;
    this.part("calls").replaceChildren(
      ...this.calls.map(({ function: { name, arguments: text } }) => {
        const call = document.createElement("code");
        call.textContent = `${name}(${text})`;
        return call;
      }),
    );
    this.part("stats").replaceChildren(
      ...this.stats().map((words) => {
        const statistic = document.createElement("span");
        statistic.textContent = words;
        return statistic;
      }),
    );
    this.part("copy").hidden = !this.text;
  }

  /** Return how fast the answer was, how long it is, and why it ended early, if it did. */
  stats() {
    const end = this.abort.signal.aborted ? "stopped" : this.finishReason === "length" ? "limit" : "";
    if (this.firstAt === null) return end ? [end] : [];
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const speed = seconds > 0 ? [`${number((this.numTokens - 1) / seconds)} tokens/s`] : [];
    const wait = latency((this.firstAt - this.startedAt) / 1000);
    return [...speed, `first token ${wait}`, counted(this.numTokens, "token") + (end && ` (${end})`)];
  }

  showRestart(words) {
    const mark = this.part("restart-mark");
    mark.hidden = false;
    if (mark.textContent !== words) mark.textContent = words;
  }

  async copy() {
    const button = this.part("copy");
    button.textContent = (await copyText(this.text)) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  }
}

/** Return the tools of the settings. */
function parsedTools(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools in the settings are not JSON: ${error.message}`);
  }
}

/** Copy `text` to the clipboard; return whether that worked. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers have this interface on https and localhost only; elsewhere the older command works.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}
