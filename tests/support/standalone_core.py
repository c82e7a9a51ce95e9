"""Cores that are started by hand."""

import contextlib
import subprocess
import sys

OPTIONS = ["--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", str(2**27)]


@contextlib.contextmanager
def standalone(default_model, address, *options):
    """A core of `vllm-mp engine`; ended by SIGTERM if it still runs."""
    command = [sys.executable, "-m", "vllm_mp.cli", "engine", "--listen", address, "--model", str(default_model)]
    process = subprocess.Popen([*command, *OPTIONS, *options], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)
