"""The least time that a device needs for a step of a language model, from the bytes to read and the operations."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mp.machine.cpu_info import multiplies_bfloat16

_CEILINGS = Path(__file__).resolve().parents[3] / "tools" / "gpu" / "device_ceilings.py"


class Ceilings(NamedTuple):
    """The best rates of a device: bytes read and operations, per second."""

    bytes: float
    flops: float


def product_dtype() -> str:
    """Return the dtype of the matrix products that `measure_ceilings` measures on this machine.

    Without instructions for bfloat16, torch multiplies matrices in float32 several times as fast.
    """
    return "bfloat16" if multiplies_bfloat16() else "float32"


def measure_ceilings() -> Ceilings:
    """Measure the ceilings of this machine's processors, for matrix products in `product_dtype()`."""
    command = [sys.executable, str(_CEILINGS), "--device", "cpu", "--copy-bytes", str(2**29), "--matrix-size", "2048"]
    command += ["--dtype", product_dtype()]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return Ceilings(found["read_bytes_per_s"], found["matmul_flops_per_s"])


class Work(NamedTuple):
    """Bytes to read and operations to compute."""

    bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """Return the least time in seconds; reading and computing overlap."""
        return max(self.bytes / ceilings.bytes, self.flops / ceilings.flops)


class ModelSize(NamedTuple):
    """Dimensions of a decoder of the Llama family, with `weight_bytes` bytes per weight and 2 per cached value."""

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
        """Return the size of the model whose config.json is `config`."""
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
        """Number of weights in all layers."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        """Number of weights in the output projection."""
        return self.vocab * self.hidden

    def decode_step(self, batch: int, context: float) -> Work:
        """Return the work of one token for each of `batch` streams with `context` tokens each."""
        weights = self.layer_weights + self.head_weights
        kv_bytes = 2 * 2 * self.layers * self.kv_heads * self.head_dim
        attention = 4 * self.layers * self.heads * self.head_dim
        return Work(
            weights * self.weight_bytes + batch * context * kv_bytes,
            batch * (2 * weights + context * attention),
        )

    def prefill(self, length: int) -> Work:
        """Return the work of a prompt up to its next token's logits. On average a query attends to half the keys."""
        attention = 4 * self.layers * self.heads * self.head_dim * length * (length + 1) / 2
        return Work(
            (self.layer_weights + self.head_weights) * self.weight_bytes,
            2 * (self.layer_weights * length + self.head_weights) + attention,
        )
