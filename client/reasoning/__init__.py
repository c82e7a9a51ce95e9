"""Parsers that split the thought of a model from its answer."""

from vllm_mp.client.answers.pieces import ContentPiece, ReasoningPiece
from vllm_mp.client.reasoning.families import (
    DeepSeekR1ReasoningParser,
    MistralReasoningParser,
    Qwen3ReasoningParser,
)
from vllm_mp.client.reasoning.reasoning_parser import (
    REASONING_PARSERS,
    ReasoningParser,
    register_reasoning_parser,
)

reasoning_parser_for_template = REASONING_PARSERS.for_template

__all__ = [
    "REASONING_PARSERS",
    "ContentPiece",
    "DeepSeekR1ReasoningParser",
    "MistralReasoningParser",
    "Qwen3ReasoningParser",
    "ReasoningParser",
    "ReasoningPiece",
    "reasoning_parser_for_template",
    "register_reasoning_parser",
]
