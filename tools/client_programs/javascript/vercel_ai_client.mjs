// Vercel's AI SDK.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";
import { BASE_URL, KEY, MODEL, TEXT, check, assert, run } from "./checks.mjs";

const provider = createOpenAICompatible({ name: "local", baseURL: BASE_URL, apiKey: KEY, supportsStructuredOutputs: true });
const model = provider(MODEL);

check("text", async () => {
  assert((await generateText({ model, prompt: TEXT, maxOutputTokens: 8 })).text);
});

check("text, streamed", async () => {
  let text = "";
  for await (const part of streamText({ model, prompt: TEXT, maxOutputTokens: 8 }).textStream) text += part;
  assert(text);
});

check("object of a schema", async () => {
  const schema = z.object({ name: z.string().max(20), job: z.enum(["baker", "teacher"]) });
  const { output } = await generateText({ model, prompt: TEXT, output: Output.object({ schema }), maxOutputTokens: 100 });
  assert(["baker", "teacher"].includes(output.job));
});

check("tool call", async () => {
  const weather = tool({ description: "Weather of a city.", inputSchema: z.object({ city: z.enum(["Bern"]) }), execute: async () => "sunny" });
  const answer = await generateText({ model, prompt: "Weather in Bern?", tools: { weather }, toolChoice: "required", maxOutputTokens: 400 });
  assert(answer.toolResults[0].output === "sunny");
});

run();
