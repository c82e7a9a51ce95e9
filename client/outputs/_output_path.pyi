from collections.abc import Callable, Sequence
from typing import Any

from vllm_mp.client.outputs.output_path import Entry, Touched
from vllm_mp.client.outputs.stream import RequestStream

def configure(*classes: type[Any]) -> None: ...
def take_in(
    entries: Sequence[Entry | None], slots: bytes, tokens: bytes, positions: bytes, now: float
) -> tuple[Touched, Touched]: ...
def take_outputs(streams: Sequence[RequestStream], take_any: Callable[[RequestStream], Any]) -> list[Any]: ...
