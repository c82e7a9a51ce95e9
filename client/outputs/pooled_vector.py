"""The vector of a pooling request."""

import numpy as np
import numpy.typing as npt

from vllm_mp import wire


class PooledVector:
    """The vector of a pooling request, which takes one slot on the wire as a completion does."""

    index = 0
    num_tokens = 0
    """Number of output tokens: a vector has none."""
    is_live = False
    """As for a completion: no tokens arrive."""
    wants_stop_strings = False

    def __init__(self) -> None:
        self.slot = -1
        """The slot of the vector; -1 until its request enters `OutputProcessor`."""
        self.finish: wire.Finished | None = None
        """The end of the request; None while it runs."""
        self._packed: bytes | None = None
        """The vector as little-endian float32; None until it has arrived."""

    @property
    def data(self) -> npt.NDArray[np.float32] | None:
        """The vector as float32 [dimensions], made by this call; None until it has arrived."""
        return None if self._packed is None else np.frombuffer(self._packed, "<f4").astype(np.float32)

    def take_in(self, data: bytes) -> None:
        """Keep the vector `data`, little-endian float32. Raises ValueError if its length is not a multiple of 4."""
        if len(data) % 4:
            raise ValueError(f"the vector has {len(data)} bytes, which is not a multiple of 4")
        self._packed = data
