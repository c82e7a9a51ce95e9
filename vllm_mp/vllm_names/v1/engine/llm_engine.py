"""The synchronous engine of vLLM, which is not here; importing it says what to use."""

from ...engine.llm_engine import __getattr__ as __getattr__
