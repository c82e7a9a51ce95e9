"""The tools that a request offers: read from its fields, offered to the chat template, found in the answer."""

import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec

from vllm_mp.client.prompts.tool_prompt import knows_tools
from vllm_mp.client.tool_parsers import (
    TOOL_PARSERS,
    CallFormat,
    HermesToolParser,
    JsonToolParser,
    Tool,
    ToolParser,
    tool_parser_for_template,
)
from vllm_mp.requests.structured_outputs import StructuredOutputsParams
from vllm_mp.server.http.body import RequestBody, refused
from vllm_mp.server.http.errors import ApiError

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_SCHEMA_PATH = re.compile(r"\bat #(/\S*?/json_schema)(?=[/:])")
"""The path to the schema of a tool in the constraint of an answer, at the beginning of a path in an error."""
_MAX_TOOLS = 1024
_MAX_FALLBACK_CALLS = 8
"""Number of calls in an answer of a model that was not trained for tools; such models may repeat a call without end."""
_ID_CHARACTERS = string.ascii_letters + string.digits


class FunctionDefinition(RequestBody):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; default: any object."""
    strict: bool | None = None
    """Hold the arguments to the schema, also where the model is free to call the function or not."""


class ToolDefinition(RequestBody):
    """A tool that the model may use."""

    type: Annotated[Literal["function"], refused("must be 'function': other tools are not served")]
    function: FunctionDefinition


class FunctionName(RequestBody):
    """The name of a function."""

    name: str


class NamedTool(RequestBody, tag_field="type", tag="function"):
    """A tool by its name; as the choice, the tool that the model must use."""

    function: FunctionName


class AllowedTools(RequestBody):
    """Some of the request's tools, and whether the model calls one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], msgspec.Meta(min_length=1)]


class AllowedToolsChoice(RequestBody, tag_field="type", tag="allowed_tools"):
    """The model may call some tools only. The prompt has all of them, so that a cached prompt serves every choice."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


@dataclass(frozen=True)
class ToolUse:
    """How the answers of a request use its tools."""

    definitions: list[dict[str, Any]]
    """What the chat template reads."""
    tools: Sequence[Tool]
    """Those that may be called."""
    parser: type[ToolParser]
    form: StructuredOutputsParams | None
    """What the answer must match; None: any text."""
    is_named: bool
    """The request names the tool."""
    is_single: bool
    """The answer has at most one call."""
    calls_after: str | None = None
    """As `AnswerParser` takes it."""
    path: str = "tools[{}].function"
    """The path of a function in the request, by its index."""

    def new_parser(self) -> ToolParser:
        """Return a parser for one answer."""
        return self.parser(self.tools)

    def located(self, message: str, form_field: str) -> tuple[str, str]:
        """Return the field that an error about the constraint `form` is due to, and the error with the path in it.

        `form_field` is the field that demands the form of an answer without a call.
        """
        found = _SCHEMA_PATH.search(message)
        if found is None or self.form is None:
            return "tools", message
        before, after = message[: found.start()], message[found.end() :]
        schema = _value_at(found[1], self.form.structural_tag)
        for tool in self.tools:
            if tool.parameters is schema:
                names = [definition["function"]["name"] for definition in self.definitions]
                path = self.path.format(names.index(tool.name))
                return f"{path}.parameters", f"{before}the parameters of {tool.name!r} at #{after}"
        return form_field, f"{before}at #{after}"

    def new_call_id(self) -> str:
        """Return an id for a call. The chat templates of Mistral's models demand nine letters or digits."""
        if self.parser.name == "mistral":
            return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def read_tools(
    definitions: Sequence[FunctionDefinition],
    choice: str,
    *,
    is_parallel: bool,
    form: StructuredOutputsParams | None,
    chat_template: str,
    parser_name: str,
    tool_fallback: bool,
    path: str = "tools[{}].function",
    form_field: str = "response_format",
    allowed_names: Sequence[str] = (),
) -> ToolUse | None:
    """Return how a request's answers use the functions `definitions`; None if they use none.

    `choice` is "none", "auto", "required", or the name of a function behind "=". `form` is what the request demands of
    an answer without a call. `parser_name` and `tool_fallback` are options of the server: how calls are found, and
    whether tools are described as text for a template that knows none. `path` is the path of a function in the request,
    and `form_field` the field that demands `form`. `allowed_names` are those of the only functions that may be called,
    all of which the prompt describes; empty: all may be. Raises ApiError, naming the field at fault.
    """
    if not definitions:
        if choice not in ("none", "auto") or allowed_names:
            raise ApiError(400, "tool_choice needs tools; add them, or leave it out", param="tool_choice")
        return None
    tools = _checked_tools(definitions, path)
    is_named = choice.startswith("=")
    allowed = _named_tools(tools, [choice[1:]] if is_named else allowed_names)
    if choice == "none":
        return None
    is_fallback = not knows_tools(chat_template)
    if is_fallback and not tool_fallback:
        raise ApiError(
            400,
            "the model's chat template knows no tools; leave out tools, serve a model that was trained for them, give "
            "a template with --chat-template, or start the server without --no-tool-fallback",
            param=path.partition("[")[0],
        )
    # The built-in prompt for tools asks for calls in this parser's format.
    parser = HermesToolParser if is_fallback else _parser_for(chat_template, parser_name)
    is_forced = is_named or choice == "required"
    call_format = parser.call_format(allowed, chat_template)
    if is_forced and call_format is None:
        parser = JsonToolParser
        call_format = JsonToolParser.call_format(allowed, chat_template)
    calls_after: str | None = None
    if is_forced:
        calls_after = ""
    elif is_fallback and form is None and call_format is not None:
        calls_after = call_format.trigger  # its grammar ends the answer with calls
    is_single = is_named or not is_parallel
    strict = frozenset(definition.name for definition in definitions if definition.strict)
    return ToolUse(
        definitions=template_tools(definitions),
        tools=allowed,
        parser=parser,
        form=_answer_form(
            call_format,
            form,
            form_field,
            is_forced,
            is_single,
            strict,
            is_fallback,
            holds_names=len(allowed) < len(tools),
        ),
        is_named=is_named,
        is_single=is_single,
        calls_after=calls_after,
        path=path,
    )


def choice_of(choice: ToolChoice | None) -> tuple[str, list[str]]:
    """Return the `choice` and the `allowed_names` that `read_tools` takes."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode, [tool.function.name for tool in choice.allowed_tools.tools]
    return f"={choice.function.name}" if isinstance(choice, NamedTool) else choice or "auto", []


def _named_tools(tools: Sequence[Tool], names: Sequence[str]) -> Sequence[Tool]:
    """Return the tools with these names; without names, all. Raises ApiError for a name that no tool has."""
    known = dict.fromkeys(tool.name for tool in tools)
    chosen = dict.fromkeys(names)
    for name in chosen:
        if name not in known:
            message = f"tool_choice names {name!r:.100}, which is not a tool; there are {', '.join(known):.300}"
            raise ApiError(400, message, param="tool_choice")
    return [tool for tool in tools if tool.name in chosen] if chosen else tools


def _checked_tools(definitions: Sequence[FunctionDefinition], path: str) -> list[Tool]:
    if len(definitions) > _MAX_TOOLS:
        raise ApiError(400, f"tools must hold at most {_MAX_TOOLS}, got {len(definitions)}", param="tools")
    tools: dict[str, Tool] = {}
    for index, definition in enumerate(definitions):
        name, field = definition.name, path.format(index)
        if not _NAME.fullmatch(name):
            message = f"the name of a function must be 1 to 128 letters, digits or any of _.:/-, got {name!r:.150}"
            raise ApiError(400, message, param=f"{field}.name")
        if name in tools:
            raise ApiError(400, f"the function {name!r} is there twice; leave out one", param=f"{field}.name")
        parameters = definition.parameters or {}
        if parameters.get("type", "object") != "object":
            message = f"the parameters of a function must be an object, got type {parameters['type']!r:.100}"
            raise ApiError(400, message, param=f"{field}.parameters")
        tools[name] = Tool(name, {"type": "object", **parameters})
    return list(tools.values())


def template_tools(definitions: Sequence[FunctionDefinition]) -> list[dict[str, Any]]:
    """Return `definitions` as chat templates read them."""
    return [_for_template(definition) for definition in definitions]


def _for_template(definition: FunctionDefinition) -> dict[str, Any]:
    function = msgspec.to_builtins(definition)
    function.pop("strict", None)
    function["parameters"] = {"type": "object", "properties": {}} | (definition.parameters or {})
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _parser_for(chat_template: str, name: str) -> type[ToolParser]:
    if name != "auto":
        return TOOL_PARSERS.get(name)
    parser = tool_parser_for_template(chat_template)
    if parser is None:
        raise ApiError(
            400,
            "the format in which the model writes calls is not known from its chat template; start the server with "
            f"--tool-call-parser, which knows {', '.join(TOOL_PARSERS.names())}",
            param="tools",
        )
    return parser


def _answer_form(
    call_format: CallFormat | None,
    form: StructuredOutputsParams | None,
    form_field: str,
    is_forced: bool,
    is_single: bool,
    strict: frozenset[str],
    is_fallback: bool,
    *,
    holds_names: bool,
) -> StructuredOutputsParams | None:
    """Return what an answer must match that consists of calls, of what `form` demands, or of text and calls.

    `strict` are the names of the functions that are strict; the schema of another is held as far as a grammar can. With
    `is_fallback` the model was not trained for tools: then all calls have arguments of their schema and end the answer.
    `holds_names`: the model knows of functions that it may not call.
    """
    if call_format is not None:
        calls = tuple(replace(call, is_lenient=call.name not in strict) for call in call_format.calls)
        call_format = replace(call_format, calls=calls)
    if call_format is None:
        if form is None:
            return None
        raise ApiError(
            400,
            f"{form_field} together with tools needs calls that a grammar can describe, which this model's are not; "
            "leave out one of them, or set tool_choice",
            param=form_field,
        )
    max_calls = 1 if is_single else _MAX_FALLBACK_CALLS if is_fallback else None
    if is_forced:
        return _structural_tag(_calls(call_format, max_calls))
    if form is not None:
        return _structural_tag({"type": "or", "elements": [_calls(call_format, max_calls), _as_format(form)]})
    if is_fallback:
        return _structural_tag(_text_and_calls(call_format, max_calls, is_last=True))
    if not call_format.trigger or not (strict or is_single or holds_names):
        return None
    # The arguments of a function that is not strict may be any object.
    calls = tuple(
        call if call.name in strict else replace(call, arguments={"type": "object"}) for call in call_format.calls
    )
    call_format = replace(call_format, calls=calls)
    if call_format.begin:
        return _structural_tag(_text_and_calls(call_format, max_calls, is_last=is_single))
    return _structural_tag(
        {
            "type": "triggered_tags",
            "triggers": [call_format.trigger],
            "tags": _tags(call_format),
            "at_least_one": False,
            "stop_after_first": is_single,
        }
    )


def _value_at(pointer: str, value: Any) -> Any:
    """Return the part of a JSON value that a JSON pointer names; None if there is none."""
    for name in pointer.split("/")[1:]:
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def _structural_tag(format: dict[str, Any]) -> StructuredOutputsParams:
    tag = {"type": "structural_tag", "format": format}
    return StructuredOutputsParams(structural_tag=tag)


def _text_and_calls(call_format: CallFormat, max_calls: int | None, *, is_last: bool) -> dict[str, Any]:
    """Return the format of text in which calls, as in `_calls`, follow the trigger; they end it if `is_last`."""
    rule = [call_format.trigger, _calls(call_format, max_calls, after=call_format.trigger)]
    return {"type": "dispatch", "rules": [rule], "loop": not is_last}


def _calls(call_format: CallFormat, max_calls: int | None, after: str = "") -> dict[str, Any]:
    """Return the format of 1 to `max_calls` calls, or any number; the text `after`, with which it begins, is there."""
    calls = _some_calls(call_format, max_calls, after="" if call_format.begin else after)
    before, behind = (
        [{"type": "const_string", "value": text}] if text else []
        for text in (call_format.begin.removeprefix(after), call_format.end)
    )
    return {"type": "sequence", "elements": [*before, calls, *behind]}


def _some_calls(call_format: CallFormat, max_calls: int | None, after: str = "") -> dict[str, Any]:
    """Return the format of 1 to `max_calls` calls, or any number; the text `after` of the first is there already."""
    tags = _tags(call_format)
    first: list[dict[str, Any]] = [{**tag, "begin": tag["begin"].removeprefix(after)} for tag in tags]
    if max_calls is None or max_calls == 1:
        return {
            "type": "tags_with_separator",
            "tags": first,
            "separator": call_format.separator + after,
            "at_least_one": True,
            "stop_after_first": max_calls == 1,
        }
    further = [{**tag, "begin": call_format.separator + tag["begin"]} for tag in tags]
    more = {"type": "repeat", "min": 0, "max": max_calls - 1, "content": {"type": "or", "elements": further}}
    return {"type": "sequence", "elements": [{"type": "or", "elements": first}, more]}


def _tags(call_format: CallFormat) -> list[dict[str, Any]]:
    return [
        {
            "type": "tag",
            "begin": call.begin,
            "content": {**_schema(call.arguments), "lenient": call.is_lenient},
            "end": call.end,
        }
        for call in call_format.calls
    ]


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def _as_format(form: StructuredOutputsParams) -> dict[str, Any]:
    """Return a form as a part of a structural tag."""
    if form.json_object:
        return _schema({"type": "object"})
    if form.json is not None:
        return _schema(msgspec.json.decode(form.constraint().text))
    raise ApiError(
        400,
        "tools go together with a JSON schema or json_object only; leave out tools, or the other form of the answer",
        param="tools",
    )
