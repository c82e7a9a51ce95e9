// The chat: a conversation whose answers stream and can be stopped. The browser keeps it over a reload.

import { readEvents, request } from "./api.js";
import { AttachedImages } from "./images.js";
import { KeptChat, keptChats } from "./kept_chats.js";
import { load, save } from "./storage.js";
import { RESTARTED, RESTARTS, Turn } from "./turn.js";

const SETTINGS = "settings";
const DEFAULTS = { system: "", tools: "", temperature: "", max_tokens: "512" };
const KEEP_MS = 1000; // Time between two writes of an answer that streams.
const SILENCE_MS = 5000; // An answer of another tab that has not grown for this time has ended with its tab.
const MOST_IMAGE_CHARACTERS = 500_000; // Of a chat that is kept. More would push out the other chats.
const NOTES = {
  kept: "",
  forked: "Another tab went on with this chat. What this tab shows is kept as a chat of its own.",
  large: "The images are too large for the browser to keep this chat: a reload ends it.",
  refused: "The browser does not keep this chat: a reload ends it.",
};

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
    this.keptAt = 0;
    this.kept = new KeptChat({ onChange: () => this.adopt(), onList: () => this.showList() });
    this.showFields(JSON.parse(load("sessionStorage", SETTINGS) ?? "{}"));
    this.followEnd();
    this.images = new AttachedImages(document.querySelector(".chat"), this.message, { present: () => this.pictures() });
    this.open(this.kept.id);

    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.answering) this.stop();
      else this.send(this.message.value);
    });
    this.message.addEventListener("keydown", (event) => this.onKey(event));
    this.message.addEventListener("input", () => this.fitMessage());
    byId("new-chat").addEventListener("click", () => this.change(() => this.open(null)));
    byId("delete-chat").addEventListener("click", () => this.change(() => this.remove()));
    byId("chats").addEventListener("change", ({ target }) => this.change(() => this.open(target.value)));
    document.addEventListener("visibilitychange", () => {
      if (this.isOutdated) this.adopt();
    });
    // The browser then ends the connection, which is no error that should be kept.
    window.addEventListener("pagehide", () => {
      if (this.answering) this.keep(true);
      this.isLeft = true;
    });
    window.addEventListener("pageshow", () => (this.isLeft = false));
    byId("settings-button").addEventListener("click", () => this.showSettings(this.settings.hidden));
    this.settings.addEventListener("input", () => {
      save("sessionStorage", SETTINGS, JSON.stringify(this.fields()));
      if (this.turns.length) this.keep();
    });
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
    if (state === "restarting") turn.showRestart(RESTARTS);
    else if (incarnation !== turn.incarnation) turn.showRestart(RESTARTED);
  }

  async send(words) {
    if (this.isSending) return;
    this.isSending = this.message.readOnly = true;
    await this.images.reading; // Those that were pasted or dropped a moment ago.
    this.isSending = this.message.readOnly = false;
    const prompt = words.trim();
    if (!(prompt || this.images.images.length) || this.answering) return;
    if (!this.settings.checkValidity()) {
      this.showSettings(true);
      this.settings.reportValidity();
      return;
    }
    this.message.value = "";
    this.fitMessage();
    this.list.setAttribute("aria-live", "polite"); // Turns that the page restores are not announced.
    this.isAtEnd = true;
    const turn = this.add(prompt, this.images.take());
    this.showParts();
    this.answer(turn);
  }

  /** Get the answer of `turn`, or the rest of it; return when it has ended. */
  answer(turn, { goesOn = false } = {}) {
    this.ended = this.stream(turn, goesOn);
    return this.ended;
  }

  async stream(turn, goesOn) {
    this.answering = turn;
    turn.begin(this.incarnation, { goesOn });
    this.showAnswering();
    this.keep();
    try {
      const response = await this.ask(turn, goesOn);
      for await (const { data } of readEvents(response)) {
        if (data === "[DONE]") break;
        turn.take(JSON.parse(data));
        if (performance.now() - this.keptAt > KEEP_MS) this.keep();
      }
      turn.end(turn.finishReason === null ? "The answer ended early: the connection was lost." : null);
    } catch (error) {
      turn.end(turn.abort.signal.aborted ? null : error.message);
    }
    this.answering = null;
    this.showAnswering();
    this.keep();
  }

  /** Return the response that streams the answer of `turn`; ask for an API key if the server wants one. */
  async ask(turn, goesOn) {
    const { system, tools, temperature, max_tokens } = this.fields();
    this.images.check(this.pictures());
    const messages = system.trim() ? [{ role: "system", content: system.trim() }] : [];
    for (const each of this.turns) {
      if (each !== turn && !each.text && !each.calls.length) continue; // It failed before its answer began.
      const call = messages.at(-1)?.tool_calls?.[0];
      messages.push(
        call
          ? { role: "tool", tool_call_id: call.id, content: contentOf(each) } // The message after a call is its result.
          : { role: "user", content: contentOf(each) },
      );
      if (each === turn && !goesOn) break;
      const calls = each.calls.length ? { tool_calls: each.calls } : {};
      messages.push({ role: "assistant", content: each.text, ...calls });
      if (each === turn) break;
    }
    const body = { messages, stream: true, stream_options: { include_usage: true } };
    if (goesOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
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

  /** Return the images of the conversation. */
  pictures() {
    return this.turns.flatMap(({ images }) => images);
  }

  /** Add a turn to the conversation. */
  add(prompt, images) {
    const turn = new Turn(prompt, images, {
      onRetry: () => this.retry(turn),
      onContinue: () => this.answering ?? this.answer(turn, { goesOn: true }),
    });
    this.turns.push(turn);
    this.list.append(turn.element);
    return turn;
  }

  /** Keep the conversation in the browser. If the page `isLeft`, the answer in progress is kept as interrupted. */
  keep(isLeft = false) {
    if (this.isLeft) return;
    const turns = this.turns.map((turn) => turn.content(isLeft));
    const areTooLarge = this.pictures().reduce((sum, { url }) => sum + url.length, 0) > MOST_IMAGE_CHARACTERS;
    this.showNote(areTooLarge ? "large" : this.kept.keep(turns[0].prompt || "Image", { settings: this.fields(), turns }));
    this.keptAt = performance.now();
    this.showList();
  }

  showNote(result) {
    const note = byId("chat-note");
    if (NOTES[result]) note.textContent = NOTES[result];
    note.hidden = !note.textContent;
  }

  /** Let the answer in progress end, then show another conversation. */
  async change(show) {
    this.stop();
    await this.ended;
    byId("chat-note").textContent = "";
    this.showNote("kept");
    this.list.setAttribute("aria-live", "off");
    this.isAtEnd = true;
    show();
    this.message.focus();
  }

  /** Show the kept conversation `id`; without one, an empty conversation. */
  open(id) {
    const content = this.kept.open(id);
    for (const { element } of this.turns) element.remove();
    this.turns = [];
    if (content !== null) this.showFields(content.settings);
    const isFresh = Date.now() - this.kept.changed < SILENCE_MS;
    for (const each of content?.turns ?? []) this.add(each.prompt, each.images ?? []).restore(each, isFresh);
    clearTimeout(this.silence);
    if (isFresh && content?.turns.some(({ isAnswering }) => isAnswering)) {
      this.silence = setTimeout(() => this.adopt(), SILENCE_MS);
    }
    this.showParts();
    this.showList();
  }

  remove() {
    this.kept.remove();
    this.open(null);
  }

  /** Show what another tab has made of this conversation. While this tab gets an answer, it goes its own way. */
  adopt() {
    this.isOutdated = document.hidden;
    if (!this.answering && !document.hidden) this.open(this.kept.id);
  }

  /** Show what depends on whether the conversation has begun. */
  showParts() {
    const hasBegun = this.turns.length > 0;
    byId("welcome").hidden = hasBegun;
    byId("new-chat").hidden = byId("delete-chat").hidden = !hasBegun;
  }

  /** Show the kept conversations, from which the reader can choose. */
  showList() {
    const chats = keptChats();
    const list = byId("chats");
    list.hidden = !chats.length;
    byId("chat-title").classList.toggle("visually-hidden", !list.hidden);
    const options = chats.map(({ id, title }) => new Option(title, id, false, id === this.kept.id));
    const isNew = this.kept.id === null;
    if (isNew) options.unshift(new Option("New chat", "", false, true));
    const key = JSON.stringify(options.map(({ value, text }) => [value, text]));
    if (list.dataset.key === key && list.value === (this.kept.id ?? "")) return; // It may be open.
    list.dataset.key = key;
    list.replaceChildren(...options);
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

  showFields(fields) {
    for (const [name, value] of Object.entries({ ...DEFAULTS, ...fields })) {
      if (name in DEFAULTS) this.settings.elements[name].value = value;
    }
  }
}

/** Return the message of a turn as the content of a request. */
function contentOf({ prompt, images }) {
  if (!images.length) return prompt;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return prompt ? [...parts, { type: "text", text: prompt }] : parts;
}

/** Return the tools of the settings. */
function parsedTools(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools in the settings are not JSON: ${error.message}`);
  }
}
