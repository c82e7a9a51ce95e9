"""The text of a chat in a Jinja template, as `apply_chat_template` of transformers makes it, without that library.

Only for plain data, with which the library does nothing else: everything that is rarer is left to the library.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from jinja2 import Template

_SCALARS: Final = (str, int, float, bool, type(None))
_CONTAINERS: Final = (list, tuple)
_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages have a thought; the library prefers the first."""
_CONTINUED: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the final message if an answer is to continue it. The library's mark, which a template may see."""
_FIRST_SAFE_JINJA: Final = (3, 1, 6)
"""The library refuses earlier versions, whose sandbox has known holes."""


def import_jinja() -> None:
    """Import what `template_text` needs, which it otherwise does when it is first called, or when a template fails."""
    import jinja2.debug
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401


def is_plain_data(value: Any) -> bool:
    """Return whether `value` consists of the types of JSON, and of tuples, and of no type that is derived from them."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind in _CONTAINERS:
        return all(map(is_plain_data, value))
    return kind is dict and all(type(key) is str and is_plain_data(item) for key, item in value.items())


def template_text(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str | None:
    """Return the text of `messages` in `template`; None if only the library knows what to do, or how to refuse it.

    All arguments are plain data. Raises jinja2.TemplateError, and what else the template causes.
    """
    if not messages or (continue_final_message and add_generation_prompt):
        return None
    compiled = _compile(template)
    if compiled is None:
        return None
    chat = [_named_reasoning({key: value for key, value in each.items() if value is not None}) for each in messages]
    final: str | None = None
    if continue_final_message:
        final = chat[-1].get("content")
        if not isinstance(final, str) or "content" not in template:
            return None
        chat[-1]["content"] = final + _CONTINUED
    text = compiled.render(
        messages=chat, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **variables
    )
    if final is None:
        return text
    if final.strip() not in text or _CONTINUED.strip() not in text:
        return None
    end = text.rindex(_CONTINUED.strip())
    keeps_spaces = text[end : end + len(_CONTINUED)] == _CONTINUED
    return text[:end] if keeps_spaces else text[:end].rstrip()


def _named_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with its thought, if it has one, under the names that templates read."""
    thought = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


@functools.lru_cache
def _compile(source: str) -> Template | None:
    """Return the compiled template `source`; None if Jinja is too old. Raises jinja2.TemplateSyntaxError."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(map(int, jinja2.__version__.split(".")[:3])) < _FIRST_SAFE_JINJA:
        return None

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, which marks the answers of the assistant, has no effect on the text."""

        tags = {"generation"}  # noqa: RUF012 (so Jinja declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Callable[[], str]) -> str:
            return caller()

    class Dict:
        """Makes dicts, and has none of the other attributes of the type."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args, **kwargs)

    class Namespace(jinja2.utils.Namespace):
        """Refuses names with which a template could reach the interpreter."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # "self" may be one of the names
            self, given = args[0], dict(*args[1:], **kwargs)
            for name in given:
                _check_name(name)
            jinja2.utils.Namespace.__init__(self, given)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace of a template takes no name that begins with an underscore, got {name!r:.100}; change it"
            )

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment.from_string(source)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return `value` as JSON; Jinja's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
