// The JavaScript client of OpenAI.
import OpenAI from "openai";
import { BASE_URL, KEY, MODEL, TEXT, check, assert, run } from "./checks.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY });
const messages = [{ role: "user", content: TEXT }];

check("chat", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 8 });
  assert(answer.choices[0].message.content);
});

check("chat, streamed", async () => {
  let text = "";
  for await (const part of await client.chat.completions.create({ model: MODEL, messages, max_tokens: 8, stream: true }))
    text += part.choices[0]?.delta?.content ?? "";
  assert(text);
});

check("tools that run by themselves", async () => {
  const parameters = { type: "object", properties: { city: { enum: ["Bern"] } }, required: ["city"], additionalProperties: false };
  const tool = { type: "function", function: { name: "weather", parameters, parse: JSON.parse, function: () => "sunny" } };
  let called = 0;
  const runner = client.chat.completions
    .runTools({ model: MODEL, messages, tools: [tool], tool_choice: { type: "function", function: { name: "weather" } }, max_tokens: 100 })
    .on("functionToolCallResult", () => called++);
  await runner.done();
  assert(called === 1);
});

check("response, streamed", async () => {
  const stream = client.responses.stream({ model: MODEL, input: TEXT, max_output_tokens: 8 });
  assert((await stream.finalResponse()).output_text);
});

check("embeddings", async () => {
  assert((await client.embeddings.create({ model: MODEL, input: ["a", "b"] })).data.length === 2);
});

run();
