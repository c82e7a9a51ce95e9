"""The parser of flags, where programs for vLLM import it from."""

from vllm_mp.arguments.argument_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
