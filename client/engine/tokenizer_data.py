"""The tokenizer of a client that has connected to a core: its own, or the files that the core sends as data.

No code that a core names runs in the client, and no path that a core names is opened. The files that it sends are
written to a private folder, with the settings that a tokenizer needs and no others: further settings of
tokenizer_config.json could name code or other files.
"""

import functools
import json
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from vllm_mp.client.cores.sources.core_source import Core
from vllm_mp.client.images.processor import read_processor_files
from vllm_mp.client.prompts.tokenizer import (
    load_fast_tokenizer,
    load_model_tokenizer,
    make_awaitable,
    use_processor_template,
)
from vllm_mp.model_store import resolve_model
from vllm_mp.model_store.tokenizer_files import (
    CHUNK_BYTES,
    DATA_FILES,
    LIST_CALL,
    MAX_TOKENIZER_BYTES,
    PROCESSOR_FILES,
    PROCESSOR_TEMPLATE_FILES,
    READ_CALL,
    SENT_FILES,
)

_SETTINGS = frozenset(
    {
        "add_prefix_space",
        "added_tokens_decoder",
        "additional_special_tokens",
        "chat_template",
        "clean_up_tokenization_spaces",
        "extra_special_tokens",
        "fix_mistral_regex",
        "model_input_names",
        "model_max_length",
        "model_specific_special_tokens",
        "padding_side",
        "split_special_tokens",
        "truncation_side",
    }
)
"""The settings that are kept, beside the special tokens, whose names end with `_token`."""
_MODEL_SETTINGS = ("model_type", "transformers_version")
"""What the loading of a tokenizer reads from a model's config.json."""
_REMEDY = "give `tokenizer` (--tokenizer) a folder or hub id of your own"


def tokenizer_of_connected(core: Core, timeout: float, own: str | None, trust_remote_code: bool) -> Any:
    """Return the tokenizer that `own` names, or else the one that `core` sends; None if the core has none.

    `core.config` then says what was loaded. Raises ValueError, with the remedy, if nothing can be loaded, and
    EngineStartError if the core does not answer within `timeout` seconds.
    """
    model = core.config.model_config
    template = model.chat_template
    model.trust_remote_code = trust_remote_code
    if own is not None:
        model.tokenizer = str(resolve_model(own, load_format="tokenizer"))
        model.skip_tokenizer_init, model.chat_template = False, None
        tokenizer = load_model_tokenizer(model)
    elif model.skip_tokenizer_init:
        return None
    elif trust_remote_code:
        raise ValueError("trust_remote_code=True needs `tokenizer`, a folder or hub id of your own; name it")
    else:
        tokenizer = make_awaitable(receive_tokenizer(functools.partial(core.connection.ask, timeout), model.hf_config))
    if template is not None:
        tokenizer.chat_template = model.chat_template = template
    return tokenizer


def processor_files_of_connected(
    core: Core, timeout: float, own: str | None
) -> Callable[[], dict[str, dict[str, Any]]]:
    """Return what returns the files of the image processor: from the folder `own`, or else those that `core` sends.

    Of a model without images there are none. Raises what `tokenizer_of_connected` raises.
    """
    if core.config.model_config.images is None:
        return dict
    if own is not None and (files := read_processor_files(Path(core.config.model_config.tokenizer))):
        return lambda: files
    contents = _receive(functools.partial(core.connection.ask, timeout), PROCESSOR_FILES)
    received: dict[str, dict[str, Any]] = {}
    for name, content in contents.items():
        try:
            received[name] = msgspec.json.decode(content, type=dict[str, Any])
        except ValueError as error:
            raise ValueError(f"the core sent {name}, which cannot be read: {error}; {_REMEDY}") from error
    return lambda: received


def receive_tokenizer(ask: Callable[..., Any], hf_config: dict[str, Any]) -> Any:
    """Return the tokenizer of the core that `ask(name, *args)` calls.

    Raises ValueError, with the remedy, if the core has no tokenizer that can be sent as data, or sends anything else.
    """
    files = _receive(ask, (*DATA_FILES, *PROCESSOR_TEMPLATE_FILES))
    if "tokenizer.json" not in files:
        raise ValueError(f"the core has no tokenizer.json, which is needed to send a tokenizer as data; {_REMEDY}")
    try:
        with tempfile.TemporaryDirectory(prefix="vllm_mp-tokenizer-") as name:
            folder = Path(name)
            for file, content in files.items():
                has_settings = file in ("tokenizer_config.json", "special_tokens_map.json")
                (folder / file).write_bytes(json.dumps(_settings(content)).encode() if has_settings else content)
            model = {key: hf_config[key] for key in _MODEL_SETTINGS if isinstance(hf_config.get(key), str)}
            (folder / "config.json").write_text(json.dumps(model))
            tokenizer = load_fast_tokenizer(folder)
            use_processor_template(tokenizer, folder)
            return tokenizer
    except Exception as error:
        raise ValueError(f"cannot load the tokenizer that the core sent: {str(error) or repr(error)}; {_REMEDY}") from (
            error
        )


def _receive(ask: Callable[..., Any], names: Collection[str]) -> dict[str, bytes]:
    """Return the content of those of the core's files that `names` has, by name.

    Raises ValueError if they are too large or not as announced.
    """
    sizes = ask(LIST_CALL)
    if not isinstance(sizes, dict) or not all(
        name in SENT_FILES and type(size) is int and size >= 0 for name, size in sizes.items()
    ):
        raise ValueError(f"the core announced no list of tokenizer files but {sizes!r:.200}; {_REMEDY}")
    if sum(sizes.values()) > MAX_TOKENIZER_BYTES:
        raise ValueError(
            f"the core's tokenizer has {sum(sizes.values())} bytes, the limit is {MAX_TOKENIZER_BYTES}; {_REMEDY}"
        )
    files = {}
    for name, size in sizes.items():
        if name not in names:
            continue
        content = bytearray()
        while len(content) < size:
            piece = ask(READ_CALL, name, len(content))
            if not isinstance(piece, bytes) or not 0 < len(piece) <= min(CHUNK_BYTES, size - len(content)):
                raise ValueError(f"the core sent a piece of {name} that was not announced; {_REMEDY}")
            content += piece
        files[name] = bytes(content)
    return files


def _settings(content: bytes) -> dict[str, Any]:
    """Return the settings in a JSON file that are kept. Raises ValueError if it holds no object."""
    settings = json.loads(content)
    if not isinstance(settings, dict):
        raise ValueError("the settings are not a JSON object")
    return {name: value for name, value in settings.items() if name in _SETTINGS or name.endswith("_token")}
