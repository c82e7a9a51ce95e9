"""What a core answers to a client that says hello."""

import hmac
import os

import msgspec

from vllm_mp import wire
from vllm_mp.config import VllmConfig
from vllm_mp.core_link.core_launch import Predecessor


class Greeting:
    """Decides who may become a client, and tells new clients what they must know of the core."""

    def __init__(
        self, config: VllmConfig, incarnation: int, operator_key: bytes, predecessor: Predecessor | None
    ) -> None:
        """Clients that say hello with `operator_key` are operators; if it is empty there are none."""
        self._config = config
        self._incarnation = incarnation
        self._operator_key = operator_key
        self._predecessor = predecessor
        self.model_digest = wire.NO_DIGEST
        """What clients are told of the model, once it is loaded; `NO_DIGEST` also while a sleep has dropped it."""
        self.is_paused = False

    def why_refused(self, hello: wire.Hello) -> str | None:
        """Return why a hello is refused, with the remedy; None if it is accepted."""
        if reason := wire.mismatch(hello):
            return reason
        key = hello.operator_key
        if not key or (self._operator_key and hmac.compare_digest(key, self._operator_key)):
            return None
        if not self._operator_key:
            return "this core has no operators: start it with --operator-key-file, or connect without an operator key"
        return "the operator key is not that of this core: copy the core's operator key file again"

    def welcome(self, client: int, token: bytes, why_dropped: str) -> wire.Welcome:
        """Return the answer to the hello of `client`; `why_dropped` is why its former connection was closed."""
        return wire.welcome(
            self._incarnation,
            client,
            os.getpid(),
            msgspec.json.encode(self._config),
            None if self._predecessor is None else self._predecessor.last_death(token),
            why_dropped,
            self.is_paused,
            self.model_digest,
        )
