"""The metadata of one GGUF file, read field by field; errors name the file, the field, its value and the remedy."""

import math
import struct

from vllm_mp.model_store.gguf_file.reader import GgufFile, Value

_MAX_FACTORS = 2**12
"""Maximum number of elements of a tensor that belongs to the configuration."""


class GgufFields:
    """Reads the fields of the architecture of `file`, whose keys begin with its name, and shapes of its tensors."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = f"{file.metadata.get('general.architecture')}."

    def value(self, key: str, default: Value | None) -> Value | None:
        return self.file.metadata.get(self._prefix + key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 1."""
        value = self.value(key, default)
        if type(value) is not int or value < 1:
            raise self.error(key, value, "it must be an integer of at least 1")
        return value

    def number(self, key: str, default: float | None = None, minimum: float = 0.0) -> float:
        """Return a finite number above 0, and at least `minimum`."""
        value = self.value(key, default)
        if type(value) not in (int, float) or not minimum <= value < math.inf or value == 0:  # type: ignore[operator]
            least = f"of at least {minimum:g}" if minimum else "above 0"
            raise self.error(key, value, f"it must be a finite number {least}")
        return float(value)  # type: ignore[arg-type]

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """Return the id of a token, which the key `tokenizer.ggml.<key>` states; None if it does not exist."""
        name = f"tokenizer.ggml.{key}"
        value = self.file.metadata.get(name)
        if value is not None and not (type(value) is int and 0 <= value < vocab_size):
            raise self.error(name, value, f"it must be the id of one of {vocab_size} tokens, which the tensors have")
        return value

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """Return the shape of a tensor, which must have so many dimensions."""
        tensor = self.file.tensors.get(name)
        if tensor is None or len(tensor.shape) != dimensions:
            found = None if tensor is None else list(tensor.shape)
            raise ValueError(f"{self.file.path}: the shape of {name} is {found}: it must have {dimensions} dimensions")
        return tensor.shape

    def factors(self, name: str, count: int) -> list[float]:
        """Return the elements of a tensor in F32 that belongs to the configuration."""
        (found,) = self.shape(name, 1)
        tensor = self.file.tensors[name]
        if tensor.type.name != "F32" or found != count or count > _MAX_FACTORS:
            raise self.error(
                name, f"{tensor.type.name} {list(tensor.shape)}", f"it must be F32 [{count}], one per pair"
            )
        with self.file.files[tensor.part].path.open("rb") as content:
            content.seek(tensor.offset)
            return list(struct.unpack(f"<{count}f", content.read(tensor.num_bytes)))

    def must_fit(self, key: str, stated: int, found: int) -> None:
        """Raise ValueError unless the tensors have what the field means."""
        if stated != found:
            raise self.error(key, self.value(key, None), f"the tensors have {found}, it means {stated}")

    def error(self, key: str, value: object, reason: str) -> ValueError:
        """Return the error for a field, or for a tensor or a field of the tokenizer with its whole name."""
        is_whole = key.startswith(("rope_f", "tokenizer.")) or key in self.file.tensors
        name = key if is_whole else self._prefix + key
        text = repr(value)
        text = text if len(text) <= 80 else text[:77] + "..."
        return ValueError(f"{self.file.path}: {name} is {text}: {reason}; convert the model again")
