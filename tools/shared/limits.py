"""The least time in which a device can do what a language model needs: bytes read, and operations computed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

_CEILINGS = Path(__file__).resolve().parents[1] / "device_ceilings.py"


class Ceilings(NamedTuple):
    """What the device does at best, per second."""

    bytes: float
    flops: float


def measure_ceilings() -> Ceilings:
    """Of this machine's processors, with products in bfloat16."""
    command = [sys.executable, str(_CEILINGS), "--device", "cpu", "--copy-bytes", str(2**29), "--matrix-size", "2048"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return Ceilings(found["read_bytes_per_s"], found["matmul_flops_per_s"])


class Work(NamedTuple):
    """What must be read and computed, in bytes and operations."""

    bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """At least; reading and computing overlap."""
        return max(self.bytes / ceilings.bytes, self.flops / ceilings.flops)


class ModelSize(NamedTuple):
    """A decoder of the Llama family with its weights in `weight_bytes` each and its KV cache in 2."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    weight_bytes: float = 2

    @staticmethod
    def of(config: dict[str, Any], weight_bytes: float = 2) -> "ModelSize":
        """`config` is the config.json of the model."""
        heads = config["num_attention_heads"]
        return ModelSize(
            config["num_hidden_layers"],
            config["hidden_size"],
            config["intermediate_size"],
            heads,
            config["num_key_value_heads"],
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
            weight_bytes,
        )

    @property
    def layer_weights(self) -> int:
        """Of all layers."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    def decode_step(self, batch: int, context: float) -> Work:
        """A token for each of `batch` streams that have `context` tokens."""
        weights = self.layer_weights + self.head_weights
        kv_bytes = 2 * 2 * self.layers * self.kv_heads * self.head_dim
        attention = 4 * self.layers * self.heads * self.head_dim
        return Work(
            weights * self.weight_bytes + batch * context * kv_bytes,
            batch * (2 * weights + context * attention),
        )

    def prefill(self, length: int) -> Work:
        """A prompt, up to the scores of its next token; each query attends to half of the keys on average."""
        attention = 4 * self.layers * self.heads * self.head_dim * length * (length + 1) / 2
        return Work(
            (self.layer_weights + self.head_weights) * self.weight_bytes,
            2 * (self.layer_weights * length + self.head_weights) + attention,
        )
