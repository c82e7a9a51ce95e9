"""A tokenizer as data: the files that a core sends to clients without a tokenizer of their own."""

import hashlib
from pathlib import Path

from vllm_mp.model_store.folder import TOKENIZER_FILES

DATA_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files that are sent: a fast tokenizer, its settings and its chat template. None of them holds code but the
template, which Jinja's sandbox runs."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""The files with the settings of a model's processor of images; the first may hold all of them."""
PROCESSOR_TEMPLATE_FILES = ("chat_template.json", "processor_config.json")
"""The files in which older processors have their chat template."""
SENT_FILES = (*DATA_FILES, *PROCESSOR_FILES)
MAX_TOKENIZER_BYTES = 2**26
"""Maximum size of all files together."""
CHUNK_BYTES = 2**18
"""Maximum size of the answer to one call: little work for the core, and less than any client may leave unread."""
LIST_CALL, READ_CALL = "tokenizer_files", "tokenizer_file"
"""The operations of a core that `TokenizerFiles` answers."""


class TokenizerFiles:
    """The tokenizer's files in the core's folder; the methods are operations that clients may call."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file that exists, by name."""
        paths = [self._folder / name for name in SENT_FILES]
        return {path.name: path.stat().st_size for path in paths if path.is_file()}

    def read(self, name: str, offset: int) -> bytes:
        """Return up to `CHUNK_BYTES` of a file from `offset` on; empty at its end.

        Raises ValueError for a name that is not one of `SENT_FILES` or an offset that is not a position in a file.
        """
        if name not in SENT_FILES:
            raise ValueError(f"the name must be one of {', '.join(SENT_FILES)}, got {name!r:.100}")
        if type(offset) is not int or not 0 <= offset <= MAX_TOKENIZER_BYTES:
            raise ValueError(f"the offset must be an integer from 0 to {MAX_TOKENIZER_BYTES}, got {offset!r:.100}")
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(offset)
                return file.read(CHUNK_BYTES)
        except OSError as error:
            raise ValueError(f"the core cannot read {name}: {error.strerror}") from error

    def digest(self) -> str:
        """Return a digest of the content of all files that determine the tokenizer."""
        paths = {self._folder / name for name in DATA_FILES}
        paths.update(path for pattern in TOKENIZER_FILES for path in self._folder.glob(pattern))
        digest = hashlib.sha256()
        for path in sorted(path for path in paths if path.is_file()):
            content = path.read_bytes()
            digest.update(f"{path.name}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()[:32]
