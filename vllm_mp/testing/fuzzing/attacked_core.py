"""The core that a campaign attacks, and how to reach it."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mp import AsyncLLM
from vllm_mp.keys.curve_keys import read_client_key
from vllm_mp.testing.engines import free_tcp_address, make_keys, standalone_core
from vllm_mp.testing.random_models import CONFIGS, save_random_model

_FLAGS = (
    *("--max-model-len", "128", "--kv-cache-memory-bytes", str(2**23), "--max-num-seqs", "32", "--num-threads", "1"),
    *("--disable-log-stats", "--check-invariants"),
)


class AttackedCore(NamedTuple):
    """The address of a core, with the keys of an attacker that is a client and an operator of it."""

    address: str
    operator_key_file: str
    key_file: str | None = None
    """Key file of a client; None for a Unix socket."""

    def connect(self, dealer: Any) -> None:
        """Connect a ZeroMQ socket to the core, as a client that it admits."""
        if self.key_file is not None:
            key = read_client_key(self.key_file)
            dealer.curve_serverkey = key.server
            dealer.curve_publickey, dealer.curve_secretkey = key.public, key.secret
        dealer.connect(self.address)

    def raw_connection(self) -> socket.socket:
        """Return a connection to the core's socket that no protocol has used, or a socket that cannot connect."""
        transport, _, place = self.address.partition("://")
        host, _, port = place.rpartition(":")
        family, address = (socket.AF_UNIX, place) if transport == "ipc" else (socket.AF_INET, (host, int(port)))
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            connection.connect(address)
        return connection


@contextlib.contextmanager
def core_under_attack(
    folder: Path, *flags: str, model: str | None = None, before: str = "", over_tcp: bool = False
) -> Iterator[AttackedCore]:
    """Run a standalone core of `model`, by default a small one with random weights, with its files in `folder`.

    `before` is a line of shell that runs first in the process of the core's parent.
    """
    if model is None:
        model = str(folder / "model")
        save_random_model(CONFIGS["llama"], folder / "model")
        flags = ("--skip-tokenizer-init", *flags)
    target = AttackedCore(f"ipc://{folder}/core.sock", str(folder / "operators"))
    if over_tcp:
        server_key, client_key = make_keys(folder)
        target = target._replace(address=free_tcp_address(), key_file=client_key)
        flags = ("--key-file", server_key, *flags)
    flags = ("--operator-key-file", target.operator_key_file, *flags)
    # The log goes to a file, because a pipe that is not read would block the core.
    with (
        (folder / "core.log").open("wb") as log,
        standalone_core(model, target.address, *_FLAGS, *flags, before=before, stderr=log),
    ):
        AsyncLLM.connect(target.address, key_file=target.key_file, timeout=60).shutdown()  # it serves from here on
        yield target
