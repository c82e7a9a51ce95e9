"""Tools for models whose chat template knows none: described in a prompt, with calls and results as text.

Calls have the format that `HermesToolParser` reads, because it says in a few words where a call begins and ends.
"""

import json
from collections.abc import Sequence
from typing import Any

_INSTRUCTIONS = """You can call functions. Each line between <tools> and </tools> describes one:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
Write one such block for each call, and nothing after the last one. The results come in the next message, between \
<tool_response> and </tool_response>. If no function helps, or if you know the results, answer in plain text."""


def knows_tools(template: str) -> bool:
    """Return whether a chat template writes tools into the prompt."""
    return "tools" in template


def has_tool_turns(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether `messages`, as templates read them, hold calls or results of tools."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def with_text_for_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, in_system_message: bool = True
) -> list[dict[str, Any]]:
    """Return `messages`, as templates read them, with `tools` and with all calls and results as plain text.

    The description of the tools ends the first system message, or is one; without `in_system_message` it begins the
    first message of the user, for templates that refuse a system message. No two messages of a user follow each other,
    because many templates demand that roles alternate.
    """
    result: list[dict[str, Any]] = []
    names: dict[Any, str] = {}
    for message in messages:
        role, content = message["role"], message["content"]
        if message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            names |= {call.get("id"): call["function"]["name"] for call in message["tool_calls"]}
            content = "\n".join(filter(None, [content, *map(_call_text, calls)]))
        elif role == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id"))
            role, content = "user", _result_text(name, content)
        if role == "user" and result and result[-1]["role"] == "user":
            result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n{content}"}
        else:
            kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
            result.append({**kept, "role": role, "content": content})
    if tools:
        _add_description(result, _INSTRUCTIONS.format(tools="\n".join(map(_json, tools))), in_system_message)
    return result


def _add_description(messages: list[dict[str, Any]], text: str, in_system_message: bool) -> None:
    if messages and messages[0]["role"] == "system":
        messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}".lstrip()}
        return
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if in_system_message or first is None:
        messages.insert(0, {"role": "system", "content": text})
    else:
        messages[first] = {**messages[first], "content": f"{text}\n\n{messages[first]['content']}"}


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{_json(call)}\n</tool_call>"


def _result_text(name: str | None, content: str) -> str:
    result = {"content": content} if name is None else {"name": name, "content": content}
    return f"<tool_response>\n{_json(result)}\n</tool_response>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
