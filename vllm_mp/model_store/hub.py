"""Models of the Hugging Face hub: from the hub's local cache if they are complete there, else downloaded."""

import errno
import re
import threading
from collections.abc import Callable
from pathlib import Path

from vllm_mp.model_store.cache import DiskFullError
from vllm_mp.model_store.folder import PICKLED, SAFETENSORS, folder_problem, has_tokenizer, noun_of, weight_files
from vllm_mp.model_store.package import DEFAULT_MODEL
from vllm_mp.model_store.progress import Progress

_CONNECT_TIMEOUT_S = 5.0
"""Longest wait for the answer to a request about a model or a file."""
_FIRST_ANSWER_TIMEOUT_S = 12.0
"""Longest wait for the hub's first answer, with retries and the look-up of its name."""

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_DESCRIPTION_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]
_WEIGHT_FILES = [SAFETENSORS.pattern]
_PICKLED_FILES = [PICKLED.pattern]
# Exports for other engines are in their own folders, and repeat the weights.
_IGNORED_FILES = ["onnx/*", "openvino/*", "coreml/*", "original/*", "metal/*", "*.onnx*"]
_CONSOLIDATED_FILES = ["consolidated*.safetensors"]
"""Mistral's own form of the weights. Beside other safetensors files it repeats them."""

_OTHER_WAYS = f"name a local model folder, a .gguf file, or the default model {DEFAULT_MODEL!r}"


def is_hub_id(model: str) -> bool:
    """Return whether `model` has the form of a hub id: "name" or "organisation/name"."""
    return bool(_HUB_ID.fullmatch(model)) and len(model) <= 96 and "--" not in model and ".." not in model


def hub_model(
    model: str,
    revision: str | None,
    token: str | None,
    cache: Path | None,
    load_format: str,
    progress: Progress,
) -> Path:
    """Return the local snapshot folder of the hub model `model` at `revision` (branch, tag or commit).

    A complete snapshot in the hub's cache (or in `cache`) is used without any network request. Weights are downloaded
    as safetensors, as pytorch_model.bin only if the model has none, and not at all if `load_format` is "dummy" or
    "tokenizer". Raises ValueError naming the model and the remedy if the
    model is not available, after at most about 15 seconds if the hub does not answer; OSError if the disk is full.
    """
    from huggingface_hub import constants

    at = f"{noun_of(load_format)} {model!r}" + (f" at revision {revision!r}" if revision else "")
    cached = _cached_snapshot(model, revision, cache)
    problem = folder_problem(cached, load_format) if cached else "the hub's cache lacks it"
    if cached and problem is None and has_tokenizer(cached):
        return cached
    if constants.HF_HUB_OFFLINE:
        if cached and problem is None:
            return cached
        raise ValueError(
            f"{at} is not on this machine and HF_HUB_OFFLINE is set: there is no such local folder, and "
            f"{problem}. Unset HF_HUB_OFFLINE to download it, or {_OTHER_WAYS}"
        )
    try:
        folder = _download(model, at, revision, token, cache, load_format, progress)
    except _Unreachable as error:
        if cached and problem is None:
            return cached
        raise ValueError(
            f"{at} is not on this machine and {constants.ENDPOINT} could not deliver it ({error}): there is no "
            f"such local folder, and {problem}. Check the network, or {_OTHER_WAYS}"
        ) from error
    if problem := folder_problem(folder, load_format):
        raise ValueError(f"{at} of the hub cannot be used: {problem}")
    return folder


class _Unreachable(Exception):
    """The hub did not answer, or the download failed; the message says how."""


def _download(
    model: str,
    at: str,
    revision: str | None,
    token: str | None,
    cache: Path | None,
    load_format: str,
    progress: Progress,
) -> Path:
    """Download the model and return its snapshot folder; `at` names it in messages. Raises _Unreachable as well."""
    import huggingface_hub
    from huggingface_hub import constants, errors
    from huggingface_hub.utils.tqdm import tqdm as hub_bar

    from vllm_mp.machine.fitted_bar import FittedBar

    class Bar(FittedBar, hub_bar):
        """A bar that fits into the terminal, and that the hub's environment variables can turn off."""

    def ask() -> None:
        api = huggingface_hub.HfApi(token=token)
        api.model_info(model, revision=revision, timeout=_CONNECT_TIMEOUT_S)

    def fetch(patterns: list[str], ignored: list[str] = _IGNORED_FILES) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                token=token,
                cache_dir=cache,
                etag_timeout=_CONNECT_TIMEOUT_S,
                allow_patterns=patterns,
                ignore_patterns=ignored,
                tqdm_class=Bar,
            )
        )

    try:
        _within(_FIRST_ANSWER_TIMEOUT_S, ask)
        progress.line(f"fetching {at} from the hub")
        if load_format in ("dummy", "tokenizer"):
            return fetch(_DESCRIPTION_FILES)
        folder = fetch(_DESCRIPTION_FILES + _WEIGHT_FILES, _IGNORED_FILES + _CONSOLIDATED_FILES)
        for patterns in (_CONSOLIDATED_FILES, _PICKLED_FILES):
            if weight_files(folder) != SAFETENSORS:
                folder = fetch(patterns)
        return folder
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{at} is gated: ask for access on its hub page, then pass hf_token or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(
            f"{noun_of(load_format)} {model!r} has no revision {revision!r} on the hub; name a branch, tag or commit"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"{at} is neither a local folder nor on the hub; if it is private pass hf_token or set "
            f"HF_TOKEN, else {_OTHER_WAYS}"
        ) from error
    except Exception as error:
        # The hub's library does not wrap the errors of its HTTP library, which differs by version.
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(Path(cache or constants.HF_HUB_CACHE) / model, str(error)) from error
        raise _Unreachable(_first_line(error)) from error


def _cached_snapshot(model: str, revision: str | None, cache: Path | None) -> Path | None:
    """Return the model's snapshot folder in the hub's cache, which may be incomplete; None if there is none."""
    from huggingface_hub import try_to_load_from_cache

    for name in ("config.json", "tokenizer.json"):
        file = try_to_load_from_cache(model, name, cache_dir=cache, revision=revision)
        if isinstance(file, str):
            return Path(file).parent
    return None


def _within(seconds: float, call: Callable[[], None]) -> None:
    """Run `call` and raise what it raises; raise TimeoutError after `seconds`.

    The HTTP library's timeouts do not bound the look-up of the host name, which can take a minute without a network.
    """
    failure: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="hub-look-up", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:.0f} seconds")
    if failure:
        raise failure[0]


def _first_line(error: Exception) -> str:
    """Return the type of `error` and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
