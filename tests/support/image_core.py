"""A core that takes images and computes nothing: it answers each request with one token."""

from pathlib import Path

import msgspec

from support.fake_core import INCARNATION, FakeCore
from support.image_models import image_fields
from vllm_mp import EngineArgs, wire
from vllm_mp.config import MultiModalConfig
from vllm_mp.model_store.tokenizer_files import LIST_CALL, READ_CALL, TokenizerFiles


class ImageCore(FakeCore):
    """Keeps what it is sent. As real cores do, it asks for images that it does not have."""

    def __init__(self, address: str, model: str, folder: Path, family: str, **options: object) -> None:
        """`folder` has the tokenizer and the processor of a small model; `options` are those of images."""
        config = EngineArgs(model=model).create_engine_config()
        config.model_config = msgspec.structs.replace(
            config.model_config,
            tokenizer=str(folder),
            hf_config=config.model_config.hf_config | image_fields(family),
        )
        config.multimodal_config = MultiModalConfig(**options)
        files = TokenizerFiles(str(folder))
        self.images: set[bytes] = set()
        self.put: list[bytes] = []
        """The digests of the images that arrived, in order."""
        self.requests: list[wire.AddRequest] = []
        """The requests that were added."""
        super().__init__(
            address,
            config,
            {LIST_CALL: files.sizes, READ_CALL: files.read, "ping": lambda: None, "reset_mm_cache": self.images.clear},
        )

    def _answer(self, message: wire.ClientMessage) -> wire.CoreMessage | None:
        if isinstance(message, wire.PutImage):
            self.images.add(message.image.digest)
            self.put.append(message.image.digest)
        elif isinstance(message, wire.AddRequest):
            missing = [image.digest for image in message.images if image.digest not in self.images]
            if missing:
                return wire.MissingImages(INCARNATION, message.slot, missing)
            self.requests.append(message)
            slot = message.slot.to_bytes(2, "little")
            finished = [wire.Finished(message.slot, 1, "length")]
            return wire.StepOutput(INCARNATION, 1, slot, (70).to_bytes(4, "little"), bytes(2), finished)
        return super()._answer(message)
