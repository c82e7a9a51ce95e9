"""Engines with ranks on two machines, both of which are this one."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_mp import AsyncEngineArgs, AsyncLLM
from vllm_mp.config.nodes import prepare_node_0, rank_host_key
from vllm_mp.testing.engines import ENGINE, free_tcp_address, running_engine


class OtherMachine:
    """The machine of node 1, whose rank host may be killed and started again."""

    def __init__(self, model: str | Path, folder: Path, **options: Any) -> None:
        """Make the keys in `folder`; `options` are the engine's, on top of `ENGINE`."""
        self.options: dict[str, Any] = {
            **options,
            "nnodes": 2,
            "master_port": int(free_tcp_address().rpartition(":")[2]),
            "node_key_file": str(folder / "core.key"),
        }
        """The options of the engine on node 0."""
        config = AsyncEngineArgs(str(model), **{**ENGINE, **self.options}).create_engine_config()
        prepare_node_0(config)
        self.flags = ["--model", str(model)]
        """The flags of an engine on node 0."""
        for name, value in {**ENGINE, **self.options}.items():
            flag = "--" + ("" if value is not False else "no-") + name.replace("_", "-")
            self.flags += [flag] if isinstance(value, bool) else [flag, str(value)]
        self._own_flags = ["--node-rank", "1", "--node-key-file", str(rank_host_key(config.parallel_config))]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the rank host."""
        command = [sys.executable, "-m", "vllm_mp.cli", "engine", "--headless", *self.flags, *self._own_flags]
        self.process = subprocess.Popen(command)

    def kill(self) -> None:
        """Kill the rank host, if it runs, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def running_on_two_machines(model: str | Path, folder: Path, **options: Any) -> Iterator[tuple[AsyncLLM, OtherMachine]]:
    """Run an engine with half of its ranks behind a rank host, whose keys are made in `folder`."""
    machine = OtherMachine(model, folder, **options)
    try:
        machine.start()
        with running_engine(model, **machine.options) as engine:
            yield engine, machine
    finally:
        machine.kill()
