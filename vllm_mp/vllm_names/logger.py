"""The loggers of programs for vLLM, which call `init_logger(__name__)`."""

from logging import getLogger as init_logger

__all__ = ["init_logger"]
