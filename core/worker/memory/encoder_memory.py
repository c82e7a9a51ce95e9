"""The memory of what makes embeddings of images, which sleeps and wakes up with the model."""

from collections.abc import Callable
from typing import Protocol

import torch

from vllm_mp.core.images.encoder import ImageEncoder
from vllm_mp.core.worker.memory.loaded_model import LoadedModel
from vllm_mp.core.worker.memory.offload import OffloadedWeights, release_memory


class Encodings(Protocol):
    """The encodings that are not complete; see `ImageEncodings`."""

    def keep(self, tiles: tuple[()]) -> None:
        """Give up all encodings but `tiles`."""
        ...


class EncoderMemory:
    """It is a `vllm_mp.core.worker.memory.sleep.Memory` without a KV cache."""

    def __init__(
        self,
        encoder: ImageEncoder,
        device: torch.device,
        beat: Callable[[], None],
        loaded: LoadedModel | None,
        encodings: Encodings,
    ) -> None:
        """`loaded` holds the encoder too if it was loaded before. `encodings` are given up before a sleep."""
        self._encoder = encoder
        self._device = device
        self._beat = beat
        self._loaded = loaded
        self._encodings = encodings
        self._offloaded: OffloadedWeights | None = None

    def offload_weights(self) -> None:
        self._encodings.keep(())
        try:
            if self._device.type != "cpu" and self._offloaded is None:
                self._offloaded = OffloadedWeights(self._encoder.module, self._beat)
        finally:
            release_memory(self._device)

    def drop_weights(self) -> None:
        self._encodings.keep(())
        self._offloaded = None
        self._encoder.drop_weights()
        if self._loaded is not None:
            self._loaded.encoder = None
        release_memory(self._device)

    def restore_weights(self) -> None:
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
        else:
            self._encoder.load_weights()
        release_memory(self._device)

    def drop_cache(self) -> None:
        pass

    def restore_cache(self) -> None:
        pass

    def prepare(self) -> None:
        pass
