"""Read the weights of a Hugging Face folder: one file, or shards with an index."""

from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_mp.core.weights.pickled_tensors import read_pickled
from vllm_mp.model_store.folder import PICKLED, SAFETENSORS, no_weights, read_weight_map, weight_files


def checkpoint_files(folder: Path) -> dict[Path, list[str] | None]:
    """Return the files with the weights in `folder`, each with the names of the tensors to read from it (None: all).

    They are safetensors, or pytorch_model.bin where there are none. Without an index all safetensors are read. Raises
    ValueError, naming the file, the cause and the remedy, if there are none, or some are missing.
    """
    form = weight_files(folder)
    if form is None:
        raise ValueError(no_weights(folder))
    single, index = folder / form.single, folder / form.index_name
    if single.is_file():
        return {single: None}
    if not index.is_file() and form == SAFETENSORS:
        return dict.fromkeys(sorted(folder.glob(form.pattern)))
    if not index.is_file():
        raise ValueError(
            f"{folder} has neither {form.single} nor {form.index_name}; point `model` at a folder with the "
            "weights of a Hugging Face checkpoint, or use load_format='dummy' for random ones"
        )
    shards: dict[Path, list[str]] = {}
    for name, file in read_weight_map(index).items():
        shards.setdefault(folder / file, []).append(name)
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(shards)} files that {form.index_name} names, the "
            f"first being {missing[0]}; download the checkpoint again"
        )
    return dict(shards)


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
