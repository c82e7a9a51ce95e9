"""The version, where programs for vLLM import it from."""

from vllm_mp import __version__

__all__ = ["__version__"]
