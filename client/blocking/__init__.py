"""`LLM`: the engine for programs without an event loop."""
