"""A digest of message types, by which client and core find that they do not match."""

import hashlib
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec


def fingerprint(messages: Iterable[type[msgspec.Struct]]) -> str:
    """Return a digest of the names, types and order of the fields of `messages` and of all structs that they hold.

    The digest is the same in every process and every version of Python.
    """
    structs: set[type[msgspec.Struct]] = set()
    pending = [*messages]
    while pending:
        struct = pending.pop()
        if struct not in structs:
            structs.add(struct)
            for field in msgspec.structs.fields(struct):
                pending += _structs_in(field.type)
    lines = [
        f"{struct.__name__} {struct.__struct_config__.tag}: "
        + " ".join(f"{field.encode_name}={_type_name(field.type)}" for field in msgspec.structs.fields(struct))
        for struct in structs
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def _structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the struct types in the type `kind`."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for argument in get_args(kind):
        yield from _structs_in(argument)


def _type_name(kind: Any) -> str:
    """Return the name of a type, with its parameters and without annotations: the same for every Python."""
    if get_origin(kind) is Annotated:
        return _type_name(get_args(kind)[0])
    names = [_type_name(argument) for argument in get_args(kind)]
    if isinstance(kind, types.UnionType) or get_origin(kind) is Union:
        return "|".join(sorted(names))
    name: str = getattr(get_origin(kind) or kind, "__name__", None) or repr(kind)
    return f"{name}[{','.join(names)}]" if names else name
