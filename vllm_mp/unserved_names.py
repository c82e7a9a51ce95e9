"""Names of vLLM that this engine does not have: importing them raises an error that says what to use instead."""

from collections.abc import Callable, Mapping
from typing import Any


def refuse(module: str, remedies: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `module` that raises ImportError for the names in `remedies`, with the remedy."""

    def get(name: str) -> Any:
        if name in remedies:
            raise ImportError(f"{name} of vLLM is not in vllm_mp: {remedies[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
