"""The interface of an engine, where programs for vLLM import it from."""

from vllm_mp import EngineClient
from vllm_mp.arguments.unserved_names import refuse

__all__ = ["EngineClient"]

__getattr__ = refuse(__name__, {"StreamingInput": "a prompt must be complete; send one request for each part"})
