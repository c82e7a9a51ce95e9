"""What the declared types of a body say: the structs in them, their marks, the values of their literals."""

import re
from typing import Any, Literal, get_args, get_origin

import msgspec


def type_at(path: str, kind: Any) -> Any:
    """Return the declared type of the value at `path`, as "messages[0].role", in a body of type `kind`."""
    for name in re.findall(r"[^.\[\]]+", re.sub(r"\[[^\]]*\]", "", path)):
        fields = (field for struct in structs(kind) for field in msgspec.structs.fields(struct))
        kind = next((field.type for field in fields if field.encode_name == name), None)
    return kind


def structs(kind: Any) -> list[type[msgspec.Struct]]:
    """Return the structs that a value of type `kind` can be or hold, not looking into structs."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for part in get_args(kind) for struct in structs(part)]


def tags(path: str, kind: Any) -> list[str | int]:
    """Return the tags of structs of which `path`, as "tool_choice.type", must hold one; none if it is another field."""
    parent, _, name = path.rpartition(".")
    configs = [struct.__struct_config__ for struct in structs(type_at(parent, kind))]
    return [config.tag for config in configs if config.tag_field == name and config.tag is not None]


def metadata(kind: Any) -> list[msgspec.Meta]:
    """Return the marks of the type `kind`, also of the members of a union."""
    if isinstance(kind, msgspec.Meta):
        return [kind]
    return [meta for part in get_args(kind) for meta in metadata(part)]


def literals(kind: Any) -> list[str | int]:
    """Return the values of the literals that the type `kind` is made of."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for part in get_args(kind) for value in literals(part)]


def mark(kind: Any, name: str) -> str | None:
    """Return what the mark `name` of the type `kind` says, as `refused` and `unserved` set it; None without one."""
    return next((str(meta.extra[name]) for meta in metadata(kind) if meta.extra and name in meta.extra), None)
