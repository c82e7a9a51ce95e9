"""The arguments that vLLM has and this engine does not serve: each is refused by name, with the reason."""

import reprlib
from typing import Any

_REASONS = {
    "chat_template": "pairs of texts are scored without a template; leave it None",
    "delay_iterations": "a profile begins with the next step; leave it None",
    "kv_hints": "the prefix cache chooses by itself which blocks it keeps; leave it None",
    "max_iterations": "a profile has at most 256 steps; leave it None, and call stop_profile() earlier",
    "mm_processor_kwargs": "prompts have no images or sounds; leave it None",
    "profile_prefix": "each profile has a folder of its own, which stop_profile() returns; leave it None",
    "prompt_adapter_request": "prompt adapters are not served, and vLLM has dropped them; give a lora_request instead",
    "reasoning_ended": "no reasoning parser runs in this engine; leave it None",
    "reasoning_parser_kwargs": "no reasoning parser runs in this engine; leave it None",
    "session_id": "requests share cached prefixes by their tokens, not by session; leave it None, or give a cache_salt "
    "in the prompt to choose who shares",
}


def check_unserved(**arguments: Any) -> None:
    """Raise NotImplementedError, with the name, the value and the reason, unless every argument is None."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}={reprlib.repr(value)}: {_REASONS[name]}")
