"""The body of a request to /v1/responses."""

from typing import Annotated, Any, Literal

import msgspec

from vllm_mp.server.http.body import Ignored, Refused, RequestBody, refused, unserved
from vllm_mp.server.openai.chat_prompt import ReasoningEffort
from vllm_mp.server.openai.generation import GenerationBody
from vllm_mp.server.openai.output_form import TextFormat
from vllm_mp.server.openai.responses.input import InputItem
from vllm_mp.server.openai.tools import FunctionDefinition

_NOTHING_STORED = refused("is not served: this server stores no responses; send the earlier turns in input")
LOGPROBS = "message.output_text.logprobs"


class TextConfig(RequestBody):
    """The settings of the text."""

    format: TextFormat | None = None
    """The form of the answer; default: any text."""
    verbosity: Annotated[Literal["medium"] | None, unserved("is served as 'medium' only")] = None


class Reasoning(RequestBody):
    """The settings of the thought of a model that thinks."""

    effort: ReasoningEffort | None = None
    """How much the model thinks, if its chat template knows that; "none" also sets `enable_thinking` to false."""
    summary: Ignored = None
    generate_summary: Ignored = None


class FunctionTool(RequestBody):
    """A function that the model may call."""

    type: Annotated[Literal["function"], refused("must be 'function': other tools are not served")]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; default: any object."""
    strict: bool | None = None
    """Hold the arguments to the schema, also where the model is free to call the function or not."""

    def definition(self) -> FunctionDefinition:
        """Return the function as chats define it."""
        return FunctionDefinition(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )


class FunctionChoice(RequestBody, tag_field="type", tag="function"):
    """A function by its name; as the choice, the function that the model must call."""

    name: str


class AllowedToolsChoice(RequestBody, tag_field="type", tag="allowed_tools"):
    """The model may call some tools only. The prompt has all of them, so that a cached prompt serves every choice."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], msgspec.Meta(min_length=1)]


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedToolsChoice


def choice_of(choice: ToolChoice | None) -> tuple[str, list[str]]:
    """Return the `choice` and the `allowed_names` that `read_tools` takes."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.mode, [tool.name for tool in choice.tools]
    return f"={choice.name}" if isinstance(choice, FunctionChoice) else choice or "auto", []


class ObfuscationOptions(RequestBody):
    """What a stream holds beside the text."""

    include_obfuscation: Ignored = None


class ResponseBody(GenerationBody, kw_only=True):
    """A request for a response."""

    input: str | list[InputItem]
    """A text, or the turns of a conversation."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    """Maximum number of tokens of the answer; default: what the context has room for. 0: only read the input."""
    truncation: Literal["auto", "disabled"] | None = None
    """ "auto": leave out the oldest turns of a conversation that is too long for the context."""
    include: (
        list[
            Literal[
                "message.output_text.logprobs",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "reasoning.encrypted_content",
                "web_search_call.action.sources",
                "web_search_call.results",
            ]
        ]
        | None
    ) = None
    """Further data for the answer; all but the log-probabilities belong to items that no answer has."""
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    """Number of most likely tokens to return with each token."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    metadata: (
        Annotated[
            dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
            msgspec.Meta(max_length=16),
        ]
        | None
    ) = None
    """Repeated in the response."""
    parallel_tool_calls: bool | None = None
    """False: an answer has at most one call."""
    prompt_cache_key: str | None = None
    """Repeated in the response."""
    safety_identifier: str | None = None
    """Repeated in the response."""
    user: str | None = None
    """Repeated in the response."""
    store: bool | None = None
    """Without effect: no response is stored, and each one says so."""
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    """False: leave out the thought of a model that thinks."""
    tools: list[FunctionTool] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether the model calls functions; default: it decides."""
    max_tool_calls: Ignored = None
    stream_options: ObfuscationOptions | None = None  # type: ignore[assignment]
    background: bool | None = None
    """Must not be true: a response that is not waited for would have to be stored."""
    conversation: Annotated[None, _NOTHING_STORED] = None
    previous_response_id: Annotated[None, _NOTHING_STORED] = None
    prompt: Annotated[None, _NOTHING_STORED] = None
    background_options: Refused = None
    context_management: Annotated[None, unserved()] = None
    moderation: Refused = None
    max_tokens: Annotated[None, refused("is called max_output_tokens here")] = None
    n: Annotated[None, refused("is not served here: a response holds one answer")] = None
    best_of: Annotated[None, refused("is not served here: a response holds one answer")] = None
    logprobs: Annotated[None, refused(f"is not served here; set include to ['{LOGPROBS}']")] = None
    prompt_logprobs: Annotated[None, refused("is not served here; use /v1/completions")] = None
    return_token_ids: Annotated[None, refused("is not served here; use /v1/chat/completions")] = None
