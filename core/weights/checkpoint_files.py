"""Read the tensors of the files with the weights of a Hugging Face folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_mp.core.weights.pickled_tensors import read_pickled
from vllm_mp.model_store.folder import PICKLED, SAFETENSORS


def read_tensors(
    shards: dict[Path, list[str] | None], progress: Callable[[float], None] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each entry of `shards`; tensors are mapped from their file, not copied.

    A .bin file in the form that torch wrote before 1.6 cannot be mapped, and is read as a whole. `progress` is called
    with the fraction of the bytes read, ending at 1.0. Raises ValueError, naming the file, the cause and the remedy,
    for a file that is unreadable, damaged or lacks a tensor.
    """
    total = max(1, sum(path.stat().st_size for path in shards))
    done = 0
    for path, wanted in shards.items():
        try:
            path.open("rb").close()  # safe_open reports a file that it may not read as absent
            for name, tensor in _read_pickled(path, wanted) if path.suffix == ".bin" else _read(path, wanted):
                yield name, tensor
                done += tensor.nbytes
                if progress is not None:
                    progress(min(1.0, done / total))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or incomplete ({error}); download it again") from None
        except OSError as error:
            raise _unreadable(path, error) from None
    if progress is not None:
        progress(1.0)


def _read(path: Path, wanted: list[str] | None) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        present = set(file.keys())
        for name in wanted if wanted is not None else file.keys():
            if name not in present:
                raise _lacks(path, name, SAFETENSORS.index_name)
            yield name, file.get_tensor(name)


def _read_pickled(path: Path, wanted: list[str] | None) -> Iterator[tuple[str, Tensor]]:
    tensors = read_pickled(path)
    for name in wanted if wanted is not None else tensors:
        if name not in tensors:
            raise _lacks(path, name, PICKLED.index_name)
        yield name, tensors[name]


def _lacks(path: Path, name: str, index: str) -> ValueError:
    return ValueError(f"{path} lacks {name}, which {index} places there; download it again")


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"cannot read {path} ({error.strerror or error}); check that it exists and its permissions")
