"""A prompt as embeddings, in the form that the wire carries."""

from typing import Annotated, Final

import msgspec

MAX_EMBEDS_BYTES: Final = 56 * 2**20
"""Bound on the embeddings of a prompt. The rest of a message of the maximum size is left for its other fields."""
EMBEDS_DTYPES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""The dtypes of embeddings, with the bytes of a value."""


class PromptEmbeds(msgspec.Struct, array_like=True, frozen=True):
    """The embeddings of a prompt, one row for each token."""

    dtype: str
    """A name in `EMBEDS_DTYPES`."""
    num_tokens: int
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_EMBEDS_BYTES)]
    """[num_tokens, hidden_size] values, little-endian."""

    def rows(self, first: int, last: int) -> memoryview:
        """Return the bytes of the rows [first, last); rows that do not exist are left out."""
        size = len(self.data) // self.num_tokens
        return memoryview(self.data)[first * size : last * size]
