"""The markers of the families of models that think."""

from vllm_mp.client.reasoning.reasoning_parser import ReasoningParser, register_reasoning_parser


class _ThinkTags(ReasoningParser):
    """Thoughts between `<think>` and `</think>`."""

    start, end = "<think>", "</think>"
    markers = (start, end)


@register_reasoning_parser
class Qwen3ReasoningParser(_ThinkTags):
    """Qwen3, and other models whose thought may be missing.

    With `enable_thinking=False` the template writes an empty thought into the prompt.
    """

    name = "qwen3"

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        return cls.end in chat_template


@register_reasoning_parser
class DeepSeekR1ReasoningParser(_ThinkTags):
    """DeepSeek-R1 and its distillates: each answer begins with a thought, whose marker may be in the prompt."""

    name = "deepseek_r1"
    always_thinks = True

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        return cls.end in chat_template and "<｜Assistant｜>" in chat_template and "thinking" not in chat_template


@register_reasoning_parser
class MistralReasoningParser(ReasoningParser):
    """Magistral: a thought between `[THINK]` and `[/THINK]`."""

    name = "mistral"
    start, end = "[THINK]", "[/THINK]"
    markers = (start, end)

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        return cls.start in chat_template
