"""The client: the asyncio half of an engine, in the user's process. Start reading at `async_llm.AsyncLLM`."""
