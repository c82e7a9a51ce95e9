"""The response object of /v1/responses: what a client gets at once, or in the first and last events of a stream."""

import time
from typing import Literal

import msgspec

from vllm_mp.server.openai.logprobs import TokenLogprob
from vllm_mp.server.openai.responses.body import FunctionTool, Reasoning, TextConfig, ToolChoice

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message, whole or so far."""

    text: str = ""
    annotations: list[None] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """The text of an answer."""

    id: str
    status: Status
    content: list[OutputText]
    role: str = "assistant"


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of a thought, whole or so far."""

    text: str = ""


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The thought before an answer."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[None] = []
    """Always empty: the thought is given as it is."""


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call of a tool."""

    id: str
    call_id: str
    """The id that the output of the call refers to."""
    name: str
    status: Status
    arguments: str = ""
    """JSON text."""


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    """What the tokens of the input are made of."""

    cached_tokens: int
    """Tokens that the prefix cache held."""
    cache_write_tokens: int = 0
    """Always 0: the prefix cache keeps no account of tokens that it takes in."""


class OutputTokensDetails(msgspec.Struct):
    """What the tokens of the output are made of."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response: the settings in force, and the output so far."""

    id: str
    object: str = "response"
    created_at: int
    """In seconds since 1970."""
    completed_at: int | None = None
    """In seconds since 1970; None unless the status is "completed"."""
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: Reasoning | None
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: TextConfig
    tool_choice: ToolChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: Usage | None = None
    user: str | None

    def end(self, output: list[OutputItem], finish_reason: str | None, usage: Usage) -> None:
        """Take in the whole output, and why it ended: a `finish_reason` of `CompletionOutput`."""
        self.output = output
        self.status = end_status(finish_reason)
        self.usage = usage
        if self.status == "completed":
            self.completed_at = int(time.time())
        elif self.status == "incomplete":
            self.incomplete_details = {"reason": "max_output_tokens"}
        else:
            self.error = ResponseError(
                "server_error", f"the generation ended early: {finish_reason}; send the request again"
            )


def end_status(finish_reason: str | None) -> Status:
    """Return the status of a response that ended for this reason."""
    return _STATUS.get(finish_reason, "failed")


_STATUS: dict[str | None, Status] = {"stop": "completed", "length": "incomplete"}
"""Statuses by `finish_reason`; all other reasons are failures."""
