// LangChain in JavaScript with its package for OpenAI's API.
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";
import { BASE_URL, KEY, MODEL, TEXT, check, assert, run } from "./checks.mjs";

const options = { model: MODEL, apiKey: KEY, configuration: { baseURL: BASE_URL } };
const chat = new ChatOpenAI({ ...options, maxTokens: 100 });
const person = z.object({ name: z.string().max(20), job: z.enum(["baker", "teacher"]) });

check("invoke and stream", async () => {
  assert((await chat.invoke(TEXT)).content);
  let text = "";
  for await (const part of await chat.stream(TEXT)) text += part.content;
  assert(text);
});

check("structured output by schema and by function", async () => {
  for (const method of ["jsonSchema", "functionCalling"])
    assert((await chat.withStructuredOutput(person, { method }).invoke(TEXT)).job);
});

check("tool call, and its result", async () => {
  const save = tool(() => "saved", { name: "save_person", description: "Save a person.", schema: person });
  const called = await chat.bindTools([save], { tool_choice: "any", parallel_tool_calls: false }).invoke(TEXT);
  assert(called.tool_calls.length === 1);
  const result = await save.invoke(called.tool_calls[0]);
  assert(await chat.bindTools([save]).invoke([new HumanMessage(TEXT), called, result]));
});

check("embeddings", async () => {
  assert((await new OpenAIEmbeddings(options).embedDocuments(["a", "b"])).length === 2);
});

check("responses API", async () => {
  assert((await new ChatOpenAI({ ...options, useResponsesApi: true }).invoke(TEXT)).text);
});

run();
