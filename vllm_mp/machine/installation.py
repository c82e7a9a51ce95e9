"""What is installed: the whole package, or the client alone."""

import importlib.util


def require_engine(purpose: str) -> None:
    """Raise ValueError, with the remedy, if only the client is installed: without the core, or without torch."""
    for name in ("vllm_mp.core", "torch"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"{purpose} needs the engine, and this installation is a client without {name}: install the whole "
                "package, or connect to a running core (--connect ADDRESS; AsyncLLM.connect in Python)"
            )
