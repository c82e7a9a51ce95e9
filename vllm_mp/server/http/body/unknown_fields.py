"""The fields of a body that its declared type does not have: found and removed at every depth."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import msgspec

from vllm_mp.arguments.suggestions import did_you_mean
from vllm_mp.server.http.body.declared_types import mark

MAX_NAME = 100
"""Number of characters of a field's name that are kept."""
_MAX_REMOVED = 64
"""Number of different fields of a body that are reported; further ones are removed unreported."""
_LIKENESS = 0.75
"""How alike an unknown name and a declared name must be for a suggestion, from 0 to 1."""


@dataclass(frozen=True)
class RemovedField:
    """A field that was removed from a body."""

    path: str
    """Such as "messages[].timestamp", without the indices of lists."""
    why: str
    """Why, as the end of a sentence; it may suggest another name."""

    @property
    def name(self) -> str:
        """The field's own name, without its path."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class _Shape:
    """Where a declared type has structs."""

    structs: tuple[type[msgspec.Struct], ...] = ()
    """Those that an object can be: one, or several that their tags tell apart."""
    items: "_Shape | None" = None
    """Of a list's items; None: no struct is in them."""
    values: "_Shape | None" = None
    """Of a mapping's values."""


@dataclass(frozen=True)
class _Field:
    """A declared field."""

    kind: Any
    shape: _Shape | None
    """None: no struct is in it."""
    unserved: str | None
    """Why its values are not served, unless they fit `kind`; None: they are served or refused."""


def remove_unknown_fields(body: Any, kind: type[msgspec.Struct]) -> list[RemovedField]:
    """Remove from `body`, decoded JSON, the fields that `kind` does not have or does not serve. Return them."""
    removed: dict[str, RemovedField] = {}
    _remove(body, _shape(kind), "", removed)
    return list(removed.values())


def _remove(value: Any, shape: _Shape | None, path: str, removed: dict[str, RemovedField]) -> None:
    if shape is None:
        return
    if isinstance(value, list):
        if shape.items is not None:
            for item in value:
                _remove(item, shape.items, f"{path}[]", removed)
    elif isinstance(value, dict):
        if shape.values is not None:
            for item in value.values():
                _remove(item, shape.values, f"{path}[]", removed)
        elif (struct := _struct_of(value, shape.structs)) is not None:
            _remove_from_object(value, struct, path, removed)


def _remove_from_object(
    value: dict[str, Any], struct: type[msgspec.Struct], path: str, removed: dict[str, RemovedField]
) -> None:
    fields = _fields(struct)
    tag_field = struct.__struct_config__.tag_field
    for name in list(value):
        field = fields.get(name)
        if field is None:
            if name != tag_field:
                del value[name]
                _note(removed, path, name, "this server does not know it", fields)
        elif field.unserved is not None and not _fits(value[name], field.kind):
            del value[name]
            _note(removed, path, name, f"it {field.unserved}", {})
        elif field.shape is not None:
            _remove(value[name], field.shape, f"{path}.{name}" if path else name, removed)


def _note(removed: dict[str, RemovedField], path: str, name: str, why: str, known: Mapping[str, object]) -> None:
    """Add a field to `removed`; `known` are the names that a misspelt name may mean."""
    name = name[:MAX_NAME]
    where = f"{path}.{name}" if path else name
    if where not in removed and len(removed) < _MAX_REMOVED:
        removed[where] = RemovedField(where, why + did_you_mean(name, list(known), likeness=_LIKENESS))


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _struct_of(value: dict[str, Any], structs: tuple[type[msgspec.Struct], ...]) -> type[msgspec.Struct] | None:
    """Return the struct that an object is; None if it is none, or if its tag is that of no struct."""
    for struct in structs:
        config = struct.__struct_config__
        if config.tag_field is None or value.get(config.tag_field) == config.tag:
            return struct
    return None


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> dict[str, _Field]:
    """Return the declared fields of `struct` by their names in JSON."""
    return {
        field.encode_name: _Field(field.type, _shape(field.type), mark(field.type, "unserved"))
        for field in msgspec.structs.fields(struct)
    }


def _shape(kind: Any) -> _Shape | None:
    """Return where a value of type `kind` has structs; None if it has none."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _Shape(structs=(kind,))
    parts = get_args(kind)
    origin = get_origin(kind)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        values = _shape(parts[1])
        return None if values is None else _Shape(values=values)
    if origin in (list, tuple, set, frozenset):
        items = _shape(parts[0])
        return None if items is None else _Shape(items=items)
    # A union, an annotated type, or a type without parts.
    shapes = [shape for part in parts if (shape := _shape(part)) is not None]
    if not shapes:
        return None
    return _Shape(
        tuple(struct for shape in shapes for struct in shape.structs),
        next((shape.items for shape in shapes if shape.items is not None), None),
        next((shape.values for shape in shapes if shape.values is not None), None),
    )
