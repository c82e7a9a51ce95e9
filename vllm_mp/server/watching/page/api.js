// Requests to the server that this page came from.

import { load, save } from "./storage.js";

const KEY = "api_key";

/** A request that failed, with its HTTP status, or status 0 if there was no response, and the server's code if any. */
export class RequestError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function setApiKey(key) {
  save("sessionStorage", KEY, key);
}

/** Return the response of `path`; with `body`, of a POST. Throws RequestError unless its status is 2xx. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  const key = load("sessionStorage", KEY);
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new RequestError(0, "The server cannot be reached.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Yield the server-sent events of a response as {event, data}. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new RequestError(0, "The connection was lost.");
      });
      if (done) return;
      const events = (buffer + value.replaceAll("\r\n", "\n")).split("\n\n");
      buffer = events.pop();
      for (const lines of events) {
        const event = { event: "message", data: "" };
        for (const line of lines.split("\n")) {
          const [, field, text] = /^(event|data): ?(.*)$/.exec(line) ?? [];
          if (field === "event") event.event = text;
          else if (field === "data") event.data += (event.data && "\n") + text;
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  try {
    const { message, code } = JSON.parse(text).error;
    return new RequestError(response.status, message, code);
  } catch {
    return new RequestError(response.status, `The server answered with status ${response.status}.`);
  }
}
