"""How the fields of a body are declared: what is refused, what has no effect, what is left out."""

from typing import Annotated, Any

import msgspec


class RequestBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of all bodies, and of the objects in them: a strict request may have no other fields than these."""


def refused(why: str = "is not served yet; leave it out") -> msgspec.Meta:
    """Return the mark of a field that refuses all values but the values of its type; the error is name and `why`."""
    return msgspec.Meta(description=f"It {why}.", extra={"refused": why})


def unserved(why: str = "is not served") -> msgspec.Meta:
    """Return the mark of a field whose values, but those of its type, are ignored as a field without a name here is.

    A strict request is refused; the error is name and `why`.
    """
    return msgspec.Meta(description=f"It {why}.", extra={"refused": f"{why}; leave it out", "unserved": why})


Refused = Annotated[None, refused()]
"""The type of a field of OpenAI's API that is refused by name, unless it is null."""

Ignored = Annotated[
    Any, msgspec.Meta(description="Accepted; it has no effect here.", extra_json_schema={"x-has-effect": False})
]
"""The type of a field that describes the request and does not change its answer."""
