from collections.abc import Callable
from typing import Any

def configure(*classes: type[Any] | tuple[str, ...]) -> None: ...

take_in: Callable[..., Any]
take_outputs: Callable[..., Any]
next_output: Callable[..., Any]
