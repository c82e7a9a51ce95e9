"""The parts of an answer: its content, its reasoning and its calls of tools, as messages and as parts of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from vllm_mp.client.answer_parser import AnswerParser
from vllm_mp.client.answers.pieces import CallArguments, CallStart, ContentPiece, Piece, ReasoningPiece
from vllm_mp.client.outputs.detokenizer import special_texts
from vllm_mp.client.reasoning import REASONING_PARSERS, ReasoningParser, reasoning_parser_for_template
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.server.http.state import ServerState
from vllm_mp.server.openai.logprobs import TokenBytes
from vllm_mp.server.openai.tools import ToolUse

_PROMPT_END = 1024
"""Number of characters before the answer that say where it begins."""


class CalledFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A called function, or in a stream what is new of it."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    """JSON text."""


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: str = "function"
    function: CalledFunction


class DeltaToolCall(msgspec.Struct, kw_only=True):
    """What is new of a call of a tool."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class Delta(msgspec.Struct, kw_only=True):
    """What is new of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same as `reasoning_content`, under its newer name."""
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The answer of the assistant."""

    role: str = "assistant"
    content: str | None
    """The text; null if the answer consists of calls."""
    refusal: str | None = None
    reasoning: str | None = None
    """The thought of a model that thinks; null without one."""
    reasoning_content: str | UnsetType = UNSET
    """The same as `reasoning`, under its older name; left out without a thought."""
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers of a request are split into parts."""

    tools: ToolUse | None = None
    reasoning: type[ReasoningParser] | None = None
    prompt: str = ""
    """The end of the prompt, which may begin the thought."""
    begun: str = ""
    """The text at the end of the prompt that the answer continues."""
    shows_reasoning: bool = True
    token_bytes: TokenBytes | None = None
    """Needed to count the tokens of the thought."""

    @property
    def is_plain(self) -> bool:
        """Whether all of an answer is its content."""
        return self.tools is None and self.reasoning is None

    @property
    def markers(self) -> frozenset[str]:
        """The texts that must not be skipped as special tokens."""
        return self.new_parser().markers

    def whole(self, text: str, token_ids: Sequence[int] = ()) -> "AnswerParts":
        """Return the parts of a whole answer; `token_ids` are needed for `num_reasoning_tokens` alone."""
        parts = AnswerParts(self, self.new_parser())
        parts.feed(text, token_ids)
        parts.finish()
        return parts

    def begin(self) -> "AnswerParts":
        """Return the parts of an answer before anything of it has arrived."""
        return AnswerParts(self, self.new_parser())

    def keeps_call(self, index: int) -> bool:
        """Return whether the call is one of those that the request allows; `index` counts the calls of an answer."""
        return index == 0 or self.tools is None or not self.tools.is_single

    def new_parser(self) -> AnswerParser:
        """Return a parser for one answer."""
        return AnswerParser(
            None if self.reasoning is None else self.reasoning(self.prompt, self.begun),
            None if self.tools is None else self.tools.new_parser(),
            calls_after=None if self.tools is None else self.tools.calls_after,
        )

    def new_counter(self) -> "ReasoningCounter | None":
        """Return a counter for the thought of one answer; None if answers are not split."""
        if self.reasoning is None or self.token_bytes is None:
            return None
        return ReasoningCounter(self.reasoning.end, self.token_bytes)


class ReasoningCounter:
    """Counts the tokens of the thought with which an answer begins, with its end; all tokens if it has no end.

    The end is found by its text, as the reasoning parser finds it: its last characters may be in one token with what
    follows them. Spaces are left out, because some tokenizers decode a single token without its first space.
    """

    def __init__(self, end: str, token_bytes: TokenBytes) -> None:
        """`end` is the text that ends the thought."""
        self.count = 0
        self._end = _without_spaces(end.encode())
        self._token_bytes = token_bytes
        self._tail = b""
        """The end of the text so far, in which `_end` may have begun."""
        self._has_ended = False

    def add(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the answer."""
        for token_id in token_ids:
            if self._has_ended:
                return
            self.count += 1
            text = self._tail + _without_spaces(self._token_bytes(token_id))
            self._has_ended = self._end in text
            self._tail = text[max(len(text) - len(self._end) + 1, 0) :]


def _without_spaces(text: bytes) -> bytes:
    return b"".join(text.split())


class AnswerParts:
    """The parts of one answer, as far as it has arrived."""

    def __init__(self, format: AnswerFormat, parser: AnswerParser) -> None:
        self._format = format
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        """(id, name, parts of the arguments) of each call."""
        self._has_thought = False
        self._reasoning_counter = format.new_counter()

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens of the thought, whether it is shown or not."""
        return self._reasoning_counter.count if self._reasoning_counter is not None and self._has_thought else 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> Delta:
        """Return what `text`, the next part of the answer, adds; `token_ids` are its tokens."""
        if self._reasoning_counter is not None:
            self._reasoning_counter.add(token_ids)
        return self._add(self._parser.feed(text))

    def finish(self) -> Delta:
        """Return what the end of the answer adds."""
        return self._add(self._parser.finish())

    def message(self, role: str = "assistant") -> AnswerMessage:
        """Return the message of the answer."""
        message = AnswerMessage(role=role, content="".join(self._content) or (None if self._calls else ""))
        if self._reasoning:
            message.reasoning = message.reasoning_content = "".join(self._reasoning)
        if self._calls:
            message.tool_calls = [
                MessageToolCall(id=call_id, function=CalledFunction(name=name, arguments="".join(parts)))
                for call_id, name, parts in self._calls
            ]
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """Return why the answer has ended, in OpenAI's words; `reason` is the engine's."""
        tools = self._format.tools
        if reason == "stop" and self._calls and tools is not None and not tools.is_named:
            return "tool_calls"
        return reason

    def _add(self, pieces: list[Piece]) -> Delta:
        delta = Delta()
        content: list[str] = []
        reasoning: list[str] = []
        calls: dict[int, DeltaToolCall] = {}
        tools = self._format.tools
        for piece in pieces:
            match piece:
                case ContentPiece(text):
                    content.append(text)
                case ReasoningPiece(text):
                    self._has_thought = True
                    reasoning.append(text)
                case CallStart(index, name) if tools is not None and self._format.keeps_call(index):
                    call_id = tools.new_call_id()
                    self._calls.append((call_id, name, []))
                    function = CalledFunction(name=name, arguments="")
                    calls[index] = DeltaToolCall(index=index, id=call_id, type="function", function=function)
                case CallArguments(index, text) if self._format.keeps_call(index):
                    new = calls.setdefault(index, DeltaToolCall(index=index, function=CalledFunction(arguments="")))
                    new.function.arguments = f"{new.function.arguments}{text}"
                    self._calls[index][2].append(text)
        self._content += content
        if content:
            delta.content = "".join(content)
        if reasoning and self._format.shows_reasoning:
            self._reasoning += reasoning
            delta.reasoning = delta.reasoning_content = "".join(reasoning)
        if calls:
            delta.tool_calls = list(calls.values())
        return delta


def is_empty(delta: Delta) -> bool:
    """Return whether nothing is new."""
    return delta.content is UNSET and delta.reasoning_content is UNSET and delta.tool_calls is UNSET


def read_answer_format(
    server: ServerState,
    params: SamplingParams,
    chat_template: str,
    prompt: str,
    tools: ToolUse | None,
    shows_reasoning: bool,
    *,
    begun: str = "",
) -> AnswerFormat:
    """Return how answers to `prompt` are split, and change `params` so that the parsers see what they must see.

    `begun` is the text at the end of the prompt that the answer continues. A form that `params` demand begins after the
    reasoning.
    """
    name = server.options.reasoning_parser
    reasoning = reasoning_parser_for_template(chat_template) if name == "auto" else None
    if name not in ("auto", "none"):
        reasoning = REASONING_PARSERS.get(name)
    token_bytes = None if reasoning is None else server.engine.token_bytes
    end = prompt[-_PROMPT_END - len(begun) :]
    answer_format = AnswerFormat(tools, reasoning, end, begun, shows_reasoning, token_bytes)
    if answer_format.is_plain:
        return answer_format
    tokenizer = server.engine.model_tokenizer
    if answer_format.markers & special_texts(tokenizer):
        params.skip_special_tokens = False
    form = params.structured_outputs
    if reasoning is not None and form is not None:
        parser = reasoning(answer_format.prompt, begun)
        start = tokenizer.encode(parser.start, add_special_tokens=False)
        # A text that is not a token cannot be told from an answer by its first token; then the answer has no reasoning.
        if parser.in_thought or (parser.may_think and len(start) == 1):
            params.structured_outputs = msgspec.structs.replace(
                form,
                reasoning_end=tokenizer.encode(reasoning.end, add_special_tokens=False),
                reasoning_start=None if parser.in_thought else start[0],
            )
    return answer_format
