"""The form that a request may demand of its output: a JSON schema, a regular expression, a choice or a grammar."""

import reprlib
from typing import Annotated, Any, Literal

import msgspec

MAX_CONSTRAINT_BYTES = 2**20
"""Maximum size of a constraint on the wire, in bytes of UTF-8."""
MAX_NESTING = 64
"""Maximum depth of objects and lists in a JSON schema or a structural tag."""
_MAX_CHOICES = 2**14
_MAX_MARKER_TOKENS = 64

ConstraintKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
BACKEND_NAMES = ("auto", "llguidance", "xgrammar", "guidance")
"""The names that callers may give as the backend. All of them mean llguidance, which compiles every constraint."""


class Constraint(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """What the output of a request must match, as the wire carries it."""

    kind: ConstraintKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_CONSTRAINT_BYTES)] = ""
    """A JSON schema, a regular expression, the choices as a JSON list of strings, a grammar (EBNF in the form of Lark
    or of GBNF), or a structural tag as JSON; empty for "json_object"."""
    any_whitespace: bool = True
    """JSON may have a space, or a line break with an indentation, between its parts; False: a compact form."""
    additional_properties: bool = True
    """An object of a schema that does not say so may have properties that the schema does not name."""
    whitespace_pattern: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """The regular expression of the whitespace in JSON; empty: as `any_whitespace` says."""
    starts_after: Annotated[tuple[int, ...], msgspec.Meta(max_length=_MAX_MARKER_TOKENS)] = ()
    """Token ids of the text that ends the reasoning. The constraint holds for the output after the first occurrence of
    the token, or of the text of several; empty: for the whole output."""
    reasoning_start: int = -1
    """Token id that begins the reasoning. If the output begins with another token, there is no reasoning, and the
    constraint holds for the whole output. -1: the output begins inside the reasoning."""


_FORM_NAMES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FORMS = frozenset(_FORM_NAMES)
"""The fields of `StructuredOutputsParams` that say what to match; the others are options."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """The form that a completion must have; names and meanings are vLLM's.

    Exactly one of `json` (a JSON schema as a dict, as text, or as a pydantic class), `json_object` (True: any JSON
    object), `regex`, `choice` (a list of strings), `grammar` (EBNF) and `structural_tag` (JSON) must be given.
    `disable_any_whitespace` allows JSON in one line only, `whitespace_pattern` is a regular expression for the
    whitespace between the parts of JSON (None: the engine's choice, by default a space, or up to two line breaks with
    up to 32 spaces or tabs), and `disable_additional_properties` forbids properties that a schema does not name. For
    models that think, `reasoning_end` are the token ids that end the thought, after which the constraint begins, and
    `reasoning_start` is the token id that begins it; None: the prompt has begun the thought already. An end of several
    tokens is found by its text, whatever tokens the model writes it in.

    Raises ValueError, naming the field and its value, for a value that can be no constraint, and TypeError for a value
    of the wrong type. Whether a schema, regex or grammar can be compiled is found by the core: a request whose
    constraint it refuses ends with `EngineGenerateError`.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: Any = None
    reasoning_start: int | None = None
    reasoning_end: list[int] | None = None

    def __post_init__(self) -> None:
        given = [name for name in _FORM_NAMES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of {', '.join(_FORM_NAMES)} must be given, got {' and '.join(given) or 'none of them'}"
            )
        self.constraint()

    @classmethod
    def from_optional(cls, **fields: Any) -> "StructuredOutputsParams | None":
        """Return the parameters with the `fields` that are not None; None if no form of output is among them."""
        given = {name: value for name, value in fields.items() if value is not None}
        return cls(**given) if FORMS & given.keys() else None

    def constraint(self) -> Constraint:
        """Return what the wire carries. Raises as the constructor does, if fields were changed since."""
        kind, text = self._kind_and_text()
        if len(text.encode()) > MAX_CONSTRAINT_BYTES:
            raise ValueError(f"{kind} must have at most {MAX_CONSTRAINT_BYTES} bytes, got {len(text.encode())}")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        pattern = "" if self.whitespace_pattern is None else _text("whitespace_pattern", self.whitespace_pattern)
        if len(pattern) > 256:
            raise ValueError(f"whitespace_pattern must have at most 256 characters, got {len(pattern)}")
        return Constraint(
            kind=kind,
            text=text,
            any_whitespace=not self.disable_any_whitespace,
            additional_properties=not self.disable_additional_properties,
            whitespace_pattern=pattern,
            starts_after=tuple(self._checked_ids("reasoning_end", self.reasoning_end or ())),
            reasoning_start=-1 if self.reasoning_start is None else self._reasoning_start(self.reasoning_start),
        )

    def _reasoning_start(self, token: Any) -> int:
        if not self.reasoning_end:
            raise ValueError("reasoning_start needs reasoning_end; add it")
        [checked] = self._checked_ids("reasoning_start", [token])
        return checked

    @staticmethod
    def _checked_ids(name: str, ids: Any) -> list[int]:
        if not isinstance(ids, list | tuple) or len(ids) > _MAX_MARKER_TOKENS:
            raise TypeError(f"{name} must be a list of at most {_MAX_MARKER_TOKENS} token ids, got {reprlib.repr(ids)}")
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
                raise ValueError(f"{name} must hold token ids, integers in [0, 2**31), got {token!r}")
        return list(ids)

    def _kind_and_text(self) -> tuple[ConstraintKind, str]:
        if self.json is not None:
            return "json", _schema_text("json", self.json)
        if self.structural_tag is not None:
            return "structural_tag", _schema_text("structural_tag", self.structural_tag, may_be_bool=False)
        if self.regex is not None:
            return "regex", _text("regex", self.regex)
        if self.grammar is not None:
            return "grammar", _text("grammar", self.grammar)
        if self.choice is not None:
            return "choice", msgspec.json.encode(_checked_choices(self.choice)).decode()
        if self.json_object is not True:
            raise ValueError(f"json_object must be True or None, got {self.json_object!r}")
        return "json_object", ""


class GuidedDecodingParams(StructuredOutputsParams):
    """`StructuredOutputsParams` under its older name, with the fields that older callers set."""

    backend: str | None = None
    """Accepted without effect if it is one of `BACKEND_NAMES`: llguidance compiles every constraint."""
    disable_fallback: bool = False
    """Accepted without effect."""

    def constraint(self) -> Constraint:
        if self.backend and self.backend not in BACKEND_NAMES:
            raise ValueError(f"backend must be one of {', '.join(BACKEND_NAMES)}, got {self.backend!r}")
        return super().constraint()


def checked_form(name: str, value: Any) -> StructuredOutputsParams | None:
    """Return `value` of the field `name` as parameters; a dict has their fields.

    Raises TypeError for another type, and what the constructor raises.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be StructuredOutputsParams or a dict of its fields, got {reprlib.repr(value)}")
    known = {field.name for field in msgspec.structs.fields(GuidedDecodingParams)}
    if unknown := sorted(set(value) - known, key=str):
        raise ValueError(f"{name} has no field {unknown[0]!r}; its fields are {', '.join(sorted(known))}")
    return (GuidedDecodingParams if {"backend", "disable_fallback"} & set(value) else StructuredOutputsParams)(**value)


def _text(name: str, value: Any) -> str:
    """Return `value` if it is text that is not empty. Raises TypeError or ValueError, naming the field `name`."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, got {reprlib.repr(value)}")
    if not value.strip():
        raise ValueError(f"{name} must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must hold valid Unicode, got {reprlib.repr(value)}") from error
    return value


def _checked_choices(choices: Any) -> list[str]:
    if not isinstance(choices, list | tuple):
        raise TypeError(f"choice must be a list of texts, got {reprlib.repr(choices)}")
    if not 0 < len(choices) <= _MAX_CHOICES:
        raise ValueError(f"choice must hold 1 to {_MAX_CHOICES} texts, got {len(choices)}")
    for text in choices:
        if not isinstance(text, str):
            raise TypeError(f"choice must hold texts, got {reprlib.repr(text)}")
        if not text:
            raise ValueError("choice must not hold an empty text; leave it out")
        _text("choice", text) if text.strip() else None
    return list(dict.fromkeys(choices))


def _schema_text(name: str, schema: Any, may_be_bool: bool = True) -> str:
    """Return a JSON schema, or a structural tag, as JSON. `schema` is a dict, text, or a pydantic class or instance."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(_text(name, schema))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{name} must be valid JSON: {error}; got {reprlib.repr(schema)}") from error
    elif isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    elif hasattr(schema, "model_dump"):
        schema = schema.model_dump(by_alias=True, exclude_none=True)
    if not isinstance(schema, dict) and not (may_be_bool and isinstance(schema, bool)):
        raise TypeError(f"{name} must be a dict, a JSON text or a pydantic class, got {reprlib.repr(schema)}")
    _check_nesting(name, schema)
    try:
        return msgspec.json.encode(schema).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name} must be plain JSON data: {error}; got {reprlib.repr(schema)}") from error


def _check_nesting(name: str, value: Any) -> None:
    """Raise ValueError if objects and lists in `value` are nested deeper than `MAX_NESTING`."""
    level, depth = [value], 0
    while level := [
        member
        for container in level
        if isinstance(container, dict | list | tuple)
        for member in (container.values() if isinstance(container, dict) else container)
    ]:
        depth += 1
        if depth > MAX_NESTING:
            raise ValueError(f"{name} must have at most {MAX_NESTING} levels of objects and lists")
