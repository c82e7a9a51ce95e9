"""The synchronous engine of vLLM, which is not here; importing it says what to use."""

from vllm_mp.arguments.unserved_names import refuse

__getattr__ = refuse(__name__, {"LLMEngine": "use LLM in a script, or AsyncLLM"})
