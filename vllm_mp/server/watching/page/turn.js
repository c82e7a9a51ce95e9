// A message and its answer: what arrives of it, how it is shown, and what is kept of it.

import { copyWithButton } from "./clipboard.js";
import { picture } from "./images.js";
import { MarkdownView } from "./markdown.js";
import { counted, latency, number } from "./units.js";

const PAUSE_RATIO = 4; // A view that took a time to draw is drawn again after this many times that time.

/** What is kept of a turn, with the values that it has before its answer. */
const KEPT = { text: "", thought: "", calls: [], numTokens: 0, finishReason: null, endedBy: "", error: null, mark: "", speeds: [] };

export class Turn {
  /** `images` go with the words of `prompt`. `onRetry()` and `onContinue()` are called when the reader wants another answer, or more of this one. */
  constructor(prompt, images, { onRetry, onContinue }) {
    this.prompt = prompt;
    this.images = images; // As {name, url}.
    Object.assign(this, structuredClone(KEPT));
    this.element = document.getElementById("turn-template").content.firstElementChild.cloneNode(true);
    this.part = (name) => this.element.querySelector(`.${name}`);
    this.part("words").textContent = prompt;
    this.part("pictures").hidden = !images.length;
    this.part("pictures").append(...images.map(picture));
    this.part("retry").addEventListener("click", onRetry);
    this.part("continue").addEventListener("click", onContinue);
    this.part("copy").addEventListener("click", () => copyWithButton(this.part("copy"), this.text));
    this.part("answer").addEventListener("click", ({ target }) => {
      const button = target.closest(".copy-code");
      if (button) copyWithButton(button, button.closest(".code").querySelector("code").textContent);
    });
  }

  /** Begin the answer, or go on with the answer so far. */
  begin(incarnation, { goesOn = false } = {}) {
    const { text, numTokens } = this;
    Object.assign(this, structuredClone(KEPT), goesOn ? { text, numTokens } : {});
    Object.assign(this, { incarnation, numBefore: this.numTokens, firstAt: null, lastAt: null });
    this.abort = new AbortController();
    this.startedAt = performance.now();
    if (!goesOn) this.view = new MarkdownView(this.part("answer"));
    this.isAnswering = true;
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
    if (usage) this.numTokens = this.numBefore + usage.completion_tokens;
    this.showSoon();
  }

  /** Take in what is new of a call: its name first, then its arguments in pieces. */
  takeCall({ index, id, function: { name, arguments: text = "" } }) {
    this.calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
    this.calls[index].function.arguments += text;
  }

  /** End the answer; `error` is a message, or null. */
  end(error) {
    this.isAnswering = false;
    this.error = error;
    this.endedBy = this.abort.signal.aborted ? "stopped" : this.finishReason === "length" ? "limit" : "";
    // An answer may be complete before the page hears that the next core serves.
    if (this.mark === RESTARTS && error === null && !this.abort.signal.aborted) this.mark = RESTARTED;
    this.show();
  }

  /** Return what is kept of the turn. If the page `isLeft`, the answer in progress ends here. */
  content(isLeft) {
    const kept = Object.fromEntries(Object.keys(KEPT).map((name) => [name, this[name]]));
    return { prompt: this.prompt, images: this.images, ...kept, isAnswering: this.isAnswering && !isLeft, ...(this.isAnswering && isLeft ? INTERRUPTED : {}) };
  }

  /** Show a kept turn; `isAnswering` says that another tab still gets its answer. */
  restore(content, isAnswering) {
    for (const name of Object.keys(KEPT)) this[name] = content[name] ?? this[name];
    if (content.isAnswering) Object.assign(this, isAnswering ? ELSEWHERE : INTERRUPTED);
    this.isAnswering = false;
    this.view = new MarkdownView(this.part("answer"));
    this.show();
  }

  /** True if a request can go on within the text of the answer. */
  get canGoOn() {
    return this.text !== "" && !this.calls.length && !this.thought && this.finishReason !== "stop" && this.endedBy !== ELSEWHERE.endedBy;
  }

  showSoon() {
    const wait = Math.max(0, (this.nextShowAt ?? 0) - performance.now());
    this.timer ??= setTimeout(() => (this.frame = requestAnimationFrame(() => this.show())), wait);
  }

  show() {
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame ?? 0);
    this.timer = this.frame = undefined;
    const begunAt = performance.now();
    this.element.dataset.state = this.isAnswering ? "answering" : "done";
    this.view.show(this.text, !this.isAnswering);
    this.part("thought").hidden = !this.thought;
    setGrowingText(this.part("thought-text"), this.thought);
    this.part("calls").hidden = !this.calls.length;
    this.part("calls").replaceChildren(
      ...this.calls.map(({ function: { name, arguments: text } }) => withText("code", `${name}(${text})`)),
    );
    this.part("stats").replaceChildren(...this.stats().map((words) => withText("span", words)));
    this.part("copy").hidden = !this.text;
    this.part("continue").hidden = !this.canGoOn;
    this.showMessage("restart-mark", this.mark);
    this.showMessage("error-text", this.error ?? "");
    const now = performance.now();
    this.nextShowAt = now + PAUSE_RATIO * (now - begunAt);
  }

  /** Return how fast the answer was, how long it is, and why it ended early, if it did. */
  stats() {
    if (this.firstAt) {
      const seconds = (this.lastAt - this.firstAt) / 1000;
      const speed = (this.numTokens - this.numBefore - 1) / seconds;
      const wait = latency((this.firstAt - this.startedAt) / 1000);
      this.speeds = [...(seconds > 0 ? [`${number(speed)} tokens/s`] : []), `first token ${wait}`];
    }
    if (!this.numTokens) return this.endedBy ? [this.endedBy] : [];
    return [...this.speeds, counted(this.numTokens, "token") + (this.endedBy && ` (${this.endedBy})`)];
  }

  showRestart(words) {
    this.mark = words;
    this.showMessage("restart-mark", words);
  }

  /** Show a line of the turn, changed only if it differs, so that a screen reader announces nothing twice. */
  showMessage(name, words) {
    const line = this.part(name);
    line.hidden = !words;
    if (line.textContent !== words) line.textContent = words;
  }
}

export const RESTARTS = "The engine restarts; the answer will continue.";
export const RESTARTED = "The engine restarted; the answer continued.";
const INTERRUPTED = { endedBy: "interrupted", error: "The page was left before the answer was complete." };
const ELSEWHERE = { endedBy: "in another tab" };

/** Show a text that mostly grows at its end. */
function setGrowingText(element, text) {
  const node = element.firstChild ?? element.appendChild(document.createTextNode(""));
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}

function withText(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}
