// The feed of /live: a greeting, then a snapshot of the engine every second. It connects again after a loss.

import { readEvents, request } from "./api.js";

const HISTORY_S = 300;
const SILENCE_MS = 6000; // The server sends a snapshot every second: silence means that the connection is lost.
const FIRST_RETRY_MS = 1000;
const LONGEST_RETRY_MS = 8000;

export class LiveFeed {
  /**
   * `onHello(facts)` and `onSnapshot(snapshot, history)` get the server's messages. `onLoading()` is called while the
   * server loads the model, `onLost(message)` when there is no connection. `askForKey(isRefused)` returns when there is
   * a new API key.
   */
  constructor({ onHello, onSnapshot, onLoading, onLost, askForKey }) {
    this.handlers = { onHello, onSnapshot, onLoading, onLost, askForKey };
    this.history = [];
  }

  /** Follow the feed for ever. */
  async run() {
    let retryMs = FIRST_RETRY_MS;
    for (let hasAskedForKey = false; ; ) {
      try {
        await this.follow(() => {
          retryMs = FIRST_RETRY_MS;
          hasAskedForKey = false;
        });
        this.handlers.onLost("The server ended the connection.");
      } catch (error) {
        if (error.status === 401) {
          await this.handlers.askForKey(hasAskedForKey);
          hasAskedForKey = true;
          continue;
        }
        if (error.code === "loading") {
          this.handlers.onLoading();
          retryMs = FIRST_RETRY_MS;
        } else {
          this.handlers.onLost(error.status ? error.message : "The server cannot be reached.");
        }
      }
      await new Promise((resolve) => setTimeout(resolve, retryMs));
      retryMs = Math.min(2 * retryMs, LONGEST_RETRY_MS);
    }
  }

  /** Follow one connection until it ends; `onMessage` is called at each message. */
  async follow(onMessage) {
    const abort = new AbortController();
    let silence;
    const expectMessage = () => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    expectMessage();
    try {
      for await (const { event, data } of readEvents(await request("live", { signal: abort.signal }))) {
        expectMessage();
        onMessage();
        const message = JSON.parse(data);
        if (event === "hello") {
          // After a loss of the connection the server may know less than this page.
          const start = message.history[0]?.time ?? Infinity;
          this.history = [...this.history.filter((point) => point.time < start), ...message.history];
          this.handlers.onHello(message);
        } else {
          this.add(message);
        }
      }
    } finally {
      clearTimeout(silence);
    }
  }

  add(snapshot) {
    this.history.push(snapshot);
    const oldest = this.history.findIndex((point) => point.time > snapshot.time - HISTORY_S);
    this.history.splice(0, oldest);
    this.handlers.onSnapshot(snapshot, this.history);
  }
}
