// The JavaScript client of Anthropic.
import Anthropic from "@anthropic-ai/sdk";
import { KEY, MODEL, TEXT, URL, check, assert, run } from "./checks.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: KEY });
const messages = [{ role: "user", content: TEXT }];

check("message", async () => {
  assert((await client.messages.create({ model: MODEL, messages, max_tokens: 8 })).content[0].text);
});

check("message, streamed", async () => {
  const stream = client.messages.stream({ model: MODEL, messages, max_tokens: 8 });
  assert((await stream.finalMessage()).content[0].text);
});

run();
