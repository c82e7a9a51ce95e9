"""Read the safetensors files of a Hugging Face folder: one file, or shards with an index."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_mp.model_store.folder import WEIGHT_INDEX

SINGLE_FILE: Final = "model.safetensors"


def checkpoint_files(folder: Path) -> dict[Path, list[str] | None]:
    """Return the safetensors files in `folder`, each with the names of the tensors to read from it (None: all).

    Raises ValueError, naming the file, the cause and the remedy, if there are none, or some are missing.
    """
    single, index = folder / SINGLE_FILE, folder / WEIGHT_INDEX
    if single.is_file():
        return {single: None}
    if not index.is_file():
        found = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
        if found:
            raise ValueError(
                f"{folder} has weights only as {found[0]}, a pickle, which can run code and is not loaded; "
                "convert it with transformers: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        raise ValueError(
            f"{folder} has neither {SINGLE_FILE} nor {WEIGHT_INDEX}; point `model` at a folder with the "
            "weights of a Hugging Face checkpoint, or use load_format='dummy' for random ones"
        )
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = [(str(name), str(file)) for name, file in weight_map.items()]
    except OSError as error:
        raise _unreadable(index, error) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a safetensors index ({error!r}); download it again") from None
    shards: dict[Path, list[str]] = {}
    for name, file in names:
        # The index is as untrusted as the checkpoint: it must not point outside the checkpoint's folder.
        if Path(file).name != file or file == "..":
            raise ValueError(
                f"{index} places {name} in {file!r}, which is not the name of a file beside it; download it again"
            )
        shards.setdefault(folder / file, []).append(name)
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(shards)} files that {WEIGHT_INDEX} names, the "
            f"first being {missing[0]}; download the checkpoint again"
        )
    return dict(shards)


def read_tensors(
    shards: dict[Path, list[str] | None], progress: Callable[[float], None] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each entry of `shards`; tensors are mapped from their file, not copied.

    `progress` is called with the fraction of the bytes read, ending at 1.0. Raises ValueError, naming the file, the
    cause and the remedy, for a file that is unreadable, damaged or lacks a tensor.
    """
    total = max(1, sum(path.stat().st_size for path in shards))
    done = 0
    for path, wanted in shards.items():
        try:
            path.open("rb").close()  # safe_open reports a file that it may not read as absent
            with safe_open(path, framework="pt") as file:
                present = set(file.keys())
                for name in wanted if wanted is not None else file.keys():
                    if name not in present:
                        raise ValueError(f"{path} lacks {name}, which {WEIGHT_INDEX} places there; download it again")
                    tensor = file.get_tensor(name)
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


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"cannot read {path} ({error.strerror or error}); check that it exists and its permissions")
