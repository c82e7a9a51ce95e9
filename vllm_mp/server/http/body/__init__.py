"""The body of a request: read with a bound, decoded into a struct with errors that name the field.

Fields that the server does not know are left out, counted and logged, unless the request or the server is strict.
"""

from vllm_mp.server.http.body.decoding import Body, decode_body
from vllm_mp.server.http.body.ignored_fields import IgnoredFields
from vllm_mp.server.http.body.marks import Ignored, Refused, RequestBody, refused, unserved
from vllm_mp.server.http.body.reading import is_strict, read_body
from vllm_mp.server.http.body.unknown_fields import RemovedField

__all__ = [
    "Body",
    "Ignored",
    "IgnoredFields",
    "Refused",
    "RemovedField",
    "RequestBody",
    "decode_body",
    "is_strict",
    "read_body",
    "refused",
    "unserved",
]
