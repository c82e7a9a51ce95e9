"""The bodies of requests to /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Any, Literal

import msgspec

from vllm_mp.server.http.body import Ignored, RequestBody, refused, unserved

_BLOCKS = refused(
    "must be one of text, image, tool_use, tool_result, thinking, redacted_thinking: documents are not served yet"
)
_SOURCES = refused("must be 'base64' or 'url': this server keeps no files")
_OWN_TOOLS = refused("must be 'custom': tools that the server itself runs are not served")


class ImageSource(RequestBody):
    """Where an image is: in `data`, or at a URL on a host that the operator allows."""

    type: Annotated[Literal["base64", "url"], _SOURCES]
    media_type: str | None = None
    """The type of the file in `data`, such as "image/png"; the file itself decides."""
    data: str | None = None
    """A file as base64."""
    url: str | None = None
    """A URL, which may be a data URL."""


class ContentBlock(RequestBody):
    """A part of a message, or of the result of a tool."""

    type: Annotated[Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"], _BLOCKS]
    text: str | None = None
    source: ImageSource | None = None
    """The image of a block of the type "image"."""
    id: str | None = None
    """The id of a call."""
    name: str | None = None
    """The tool that a call names."""
    input: dict[str, Any] | None = None
    """The arguments of a call."""
    tool_use_id: str | None = None
    """The call that a result belongs to."""
    content: "str | list[ContentBlock] | None" = None
    """The result of a tool."""
    is_error: bool | None = None
    """The tool has failed; the content says how."""
    thinking: str | None = None
    """The thought of an earlier answer."""
    signature: Ignored = None
    data: Ignored = None
    cache_control: Ignored = None
    citations: Ignored = None
    caller: Ignored = None


class Message(RequestBody):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class Tool(RequestBody):
    """A tool that the model may use."""

    name: str
    input_schema: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; default: any object."""
    description: str | None = None
    type: Annotated[Literal["custom"] | None, _OWN_TOOLS] = None
    strict: bool | None = None
    """Hold the arguments to the schema, also where the model is free to use the tool or not."""
    cache_control: Ignored = None
    input_examples: Ignored = None
    eager_input_streaming: Ignored = None
    defer_loading: Ignored = None
    allowed_callers: Ignored = None


class ToolChoice(RequestBody):
    """Whether the model uses tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool that the model must use, for the type "tool"."""
    disable_parallel_tool_use: bool | None = None
    """The answer has at most one call."""


class Thinking(RequestBody):
    """Whether a model that can think does so."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = None
    """It has no effect: `max_tokens` bounds thought and answer together."""
    display: Ignored = None


class OutputFormat(RequestBody):
    """The form of the answer."""

    type: Annotated[Literal["json_schema"], refused("must be 'json_schema'")]
    schema_: dict[str, Any] = msgspec.field(name="schema")


class OutputConfig(RequestBody):
    """The form of the answer, and how much the model thinks."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """How much the model thinks, if its chat template knows that."""


class TokensBody(RequestBody, kw_only=True):
    """A conversation whose tokens are counted."""

    model: str | None = None
    messages: list[Message]
    system: str | list[ContentBlock] | None = None
    """A system message before the conversation."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    """Whether the model uses tools; default: it decides."""
    thinking: Thinking | None = None
    """Default: the model decides, if it can think."""
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The same as `output_config.format`, under its older name."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""


class MessagesBody(TokensBody, kw_only=True):
    """A request for an answer to a conversation."""

    max_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    """Maximum number of tokens of the answer."""
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    """Texts that end the answer before them."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    """Only prompts with the same salt share cached prefixes."""
    priority: int | None = None
    """A lower number is scheduled earlier, with `--scheduling-policy priority`."""
    thread: dict[str, Any] | None = None
    """Refused: no conversation is stored. Anthropic's clients then send the whole conversation."""
    metadata: Ignored = None
    service_tier: Ignored = None
    cache_control: Ignored = None
    context_management: Annotated[None, unserved()] = None
    container: Annotated[None, unserved()] = None
    mcp_servers: Annotated[None, unserved()] = None
