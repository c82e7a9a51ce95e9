// The chats that this browser keeps, the latest of all its tabs. Each has an entry of its own in localStorage: a line
// with its version, time and title, then its content.

import { load, names, onOtherTab, save } from "./storage.js";

const PREFIX = "chat.";
const CURRENT = "chat"; // In sessionStorage: the chat of this tab. A reload keeps it, a new tab begins without it.
const MOST_CHATS = 30;
const MOST_CHARACTERS = 2_000_000; // Browsers keep about five million for all of a server.
const TITLE_LENGTH = 60;

/** The chat of this tab, as it is kept. A tab never overwrites what another tab has changed since it read the chat. */
export class KeptChat {
  /** `onChange()` is called when another tab has changed or removed this chat, `onList()` when it did so with any chat. */
  constructor({ onChange, onList }) {
    this.id = load("sessionStorage", CURRENT);
    this.version = null; // Of the content that this tab has read or written last.
    this.changed = 0;
    onOtherTab((name) => {
      if (name === null || name === PREFIX + this.id) onChange();
      if (name === null || name.startsWith(PREFIX)) onList();
    });
  }

  /** Return the content of the kept chat `id`, which becomes the chat of this tab, or null if it is not kept. */
  open(id = this.id) {
    this.begin();
    const entry = id === null ? null : read(id);
    if (entry === null) return null;
    this.setId(id);
    this.version = entry.version;
    this.changed = entry.changed;
    return entry.content;
  }

  /** Begin a chat that is not kept yet. */
  begin() {
    this.setId(null);
    this.version = null;
  }

  /**
   * Keep the chat. Return "kept", or "forked" if another tab has changed it: then this tab's content is kept as a chat of
   * its own. Return "refused" if it is too long, or if the browser does not keep it.
   */
  keep(title, content) {
    let result = "kept";
    if (this.id !== null && this.version !== null) {
      const version = head(this.id)?.version ?? this.version;
      if (version !== this.version) {
        this.id = null;
        result = "forked";
      }
    }
    const id = this.id ?? crypto.getRandomValues(new Uint32Array(2)).join("");
    const version = crypto.getRandomValues(new Uint32Array(2)).join("");
    const changed = Date.now();
    const entry = `${JSON.stringify({ version, changed, title: title.slice(0, TITLE_LENGTH) })}\n${JSON.stringify(content)}`;
    if (!write(id, entry)) return "refused";
    this.setId(id);
    Object.assign(this, { version, changed });
    return result;
  }

  /** Remove the chat from the browser. */
  remove() {
    if (this.id !== null) save("localStorage", PREFIX + this.id, null);
    this.begin();
  }

  setId(id) {
    this.id = id;
    save("sessionStorage", CURRENT, id);
  }
}

/** Return the kept chats as {id, changed, title}, the latest first. */
export function keptChats() {
  const chats = names("localStorage", PREFIX).map((name) => ({ id: name.slice(PREFIX.length), ...head(name.slice(PREFIX.length)) }));
  return chats.filter(({ version }) => version).sort((one, other) => other.changed - one.changed);
}

/** Write an entry; the oldest others make room for it. Return whether it is kept. */
function write(id, entry) {
  if (entry.length > MOST_CHARACTERS) return false;
  const name = PREFIX + id;
  if (load("localStorage", name) === null) prune(id, entry.length);
  while (!save("localStorage", name, entry)) {
    const oldest = keptChats().findLast((chat) => chat.id !== id);
    if (oldest === undefined) return false;
    save("localStorage", PREFIX + oldest.id, null);
  }
  return true;
}

/** Remove the oldest chats beyond the limits, so that an entry of `length` has room. */
function prune(id, length) {
  let characters = length;
  keptChats().forEach((chat, index) => {
    if (chat.id === id) return;
    characters += load("localStorage", PREFIX + chat.id).length;
    if (index >= MOST_CHATS - 1 || characters > MOST_CHARACTERS) save("localStorage", PREFIX + chat.id, null);
  });
}

function head(id) {
  const entry = load("localStorage", PREFIX + id);
  try {
    return JSON.parse(entry.slice(0, entry.indexOf("\n")));
  } catch {
    return null; // Nothing is kept, or it is not what this page writes.
  }
}

function read(id) {
  const entry = load("localStorage", PREFIX + id);
  try {
    const content = JSON.parse(entry.slice(entry.indexOf("\n")));
    return content.turns.every(isTurn) ? { ...head(id), content } : null;
  } catch {
    return null;
  }
}

function isTurn({ prompt, text, thought, calls, speeds, images = [] }) {
  return [prompt, text, thought].every((words) => typeof words === "string") && [calls, speeds, images].every(Array.isArray);
}
