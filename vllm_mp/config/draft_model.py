"""Which models may draft tokens for another model, and in which engines."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from vllm_mp.config.engine_options import EngineOptions
from vllm_mp.model_config.architecture import Architecture, NativeArchitecture


@contextlib.contextmanager
def naming_draft(name: str) -> Iterator[None]:
    """Let each ValueError of the block begin with the field that names the draft model `name`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"speculative_config['model']={name!r}: {error}") from error


def check_one_process(args: EngineOptions, backend: str) -> None:
    """Raise NotImplementedError if a core of `args` has several processes, or runs where `backend` says: on Ray."""
    sizes = {name: getattr(args, name) for name in ("tensor_parallel_size", "pipeline_parallel_size", "nnodes")}
    asked = next((f"{name}={size}" for name, size in sizes.items() if size > 1), None)
    if asked is None and backend == "ray":
        asked = "data_parallel_backend='ray'"
    if asked is not None:
        raise NotImplementedError(
            f"speculative_config: method='draft_model' is served in cores of one process on this machine, but {asked}; "
            "leave out one of them, or draft with the method ngram or suffix"
        )


def check_draft(name: str, architecture: Architecture, why_not_native: str) -> None:
    """Raise ValueError unless the model `name` generates text and is native; `why_not_native` is a reason, or empty."""
    wanted = f"speculative_config['model']={name!r}"
    if architecture.is_encoder or not architecture.has_head:
        raise ValueError(f"{wanted} ({architecture.name}) generates no text; name a smaller model that does")
    if not isinstance(architecture, NativeArchitecture):
        raise ValueError(
            f"{wanted} ({architecture.name}) has no native model, which a draft model needs{why_not_native}; name "
            "another, or draft with the method ngram or suffix"
        )


def check_same_vocabulary(
    name: str, target_name: str, architecture: Architecture, target: Architecture, folders: tuple[Path, Path] | None
) -> None:
    """Raise ValueError if the draft model `name` has other tokens than the model `target_name`.

    `folders` are those of the tokenizers of the draft model and of the target; None: they are not compared. Nor are
    they if one of them has no tokenizer.json.
    """
    wanted = f"speculative_config['model']={name!r}"
    remedy = "name a smaller model of the same family, or draft with the method ngram or suffix"
    if architecture.vocab_size != target.vocab_size:
        raise ValueError(
            f"{wanted} has a vocabulary of {architecture.vocab_size} tokens, and model={target_name!r} one of "
            f"{target.vocab_size}; {remedy}"
        )
    paths = [] if folders is None else [folder / "tokenizer.json" for folder in folders]
    if not paths or not all(path.is_file() for path in paths):
        return
    own, expected = (path.read_bytes() for path in paths)
    if own == expected:
        return
    drafted, known = _token_ids(own), _token_ids(expected)
    if drafted is not None and known is not None and drafted != known:
        differing = next(iter(sorted(set(drafted.items()) ^ set(known.items()))))
        raise ValueError(
            f"{wanted} has another tokenizer than model={target_name!r}: the token {differing[0]!r} has the ids "
            f"{drafted.get(differing[0])} and {known.get(differing[0])}; {remedy}"
        )


def _token_ids(tokenizer: bytes) -> dict[str, int] | None:
    """Return the id of each token of the content of a tokenizer.json; None if it cannot be read."""
    try:
        content: Any = msgspec.json.decode(tokenizer)
        vocabulary: Any = content["model"]["vocab"]
        added = content.get("added_tokens") or []
        if isinstance(vocabulary, list):  # of a unigram model: pairs of token and score
            vocabulary = {pair[0]: number for number, pair in enumerate(vocabulary)}
        return {**vocabulary, **{token["content"]: token["id"] for token in added}}
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError, IndexError):
        return None
