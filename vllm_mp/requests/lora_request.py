"""A LoRA adapter as requests and calls name it, and as a core tells its successor of it."""

from typing import Annotated

import msgspec

MAX_LORA_ID = 2**31 - 1
MAX_LORA_NAME_LENGTH = 256
MAX_LORA_PATH_LENGTH = 4096

_Name = Annotated[str, msgspec.Meta(max_length=MAX_LORA_NAME_LENGTH)]
_Path = Annotated[str, msgspec.Meta(max_length=MAX_LORA_PATH_LENGTH)]


class LoRARequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A LoRA adapter: its name, its number, and the folder of its files on the core's machine.

    `lora_int_id` is at least 1, and names the adapter in the engine: requests with the same id use the same adapter.
    `load_inplace`: the folder is read again, and replaces an adapter with the same id. `base_model_name` has no effect.
    As in vLLM, adapters with the same name are equal.

    Raises ValueError for an empty or too long name or path and for an id out of range, TypeError for values of another
    type, and NotImplementedError for `tensorizer_config_dict`.
    """

    lora_name: _Name
    lora_int_id: int
    lora_path: _Path = ""
    base_model_name: _Name | None = None
    tensorizer_config_dict: None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        for field, limit in (("lora_name", MAX_LORA_NAME_LENGTH), ("lora_path", MAX_LORA_PATH_LENGTH)):
            value = getattr(self, field)
            if not isinstance(value, str):
                raise TypeError(f"{field} must be a string, got {value!r}")
            if not value or len(value) > limit:
                raise ValueError(f"{field} must have 1 to {limit} characters, got {len(value)}: {value[:100]!r}")
            if "\0" in value or not _is_unicode(value):
                raise ValueError(f"{field} must be valid Unicode without NUL, got {value[:100]!r}")
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"lora_int_id must be an integer, got {number!r}")
        if not 1 <= number <= MAX_LORA_ID:
            raise ValueError(f"lora_int_id must be at least 1 and at most {MAX_LORA_ID}, got {number}")
        if not isinstance(self.load_inplace, bool):
            raise TypeError(f"load_inplace must be a bool, got {self.load_inplace!r}")
        if self.tensorizer_config_dict is not None:
            raise NotImplementedError("tensorizer_config_dict is not served; give a PEFT folder as lora_path")

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


def parse_adapter(text: str, number: int, option: str) -> LoRARequest:
    """Return the adapter with the id `number` that `text` names: NAME=FOLDER, or a JSON object with name and path.

    Raises ValueError, which names `option` and the remedy, for another text.
    """
    name, is_pair, path = text.partition("=")
    if text.lstrip().startswith("{"):
        try:
            module = msgspec.json.decode(text, type=_Module)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{option}: {text!r} is not a JSON object with name and path: {error}") from None
        name, path = module.name, module.path
    elif not is_pair:
        raise ValueError(f"{option} must be NAME=FOLDER, got {text!r}")
    try:
        return LoRARequest(name, number, path)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter in JSON, as vLLM's flag `--lora-modules` takes it."""

    name: str
    path: str
    base_model_name: str | None = None


class AdapterRecord(msgspec.Struct, array_like=True, frozen=True):
    """What the successor of a core must know of an adapter."""

    id: int
    name: str
    path: str
    digest: str = ""
    """Digest of the weights that the core had loaded; empty if it had not loaded them."""
    is_added: bool = True
    """A call of `add_lora` named the adapter, so that it is known until it is removed."""
    is_pinned: bool = False
    number: int = 0
    """The number of the weights with this digest, in the hashes of blocks of the KV cache."""
    is_current: bool = True
    """False: the adapter was removed or replaced, and only requests that began with it may use it."""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
