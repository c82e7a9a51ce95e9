"""What makes embeddings of images gives its memory back in a sleep, and makes the same embeddings after it."""

import pytest
import torch

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.images.encoder import ImageEncoder
from vllm_mp.core.worker.image_encodings import ImageEncodings
from vllm_mp.core.worker.memory import encoder_memory
from vllm_mp.core.worker.memory.encoder_memory import EncoderMemory
from vllm_mp.testing.image_models import IMAGE_MODELS, image_arrays, save_image_model


def encoder_of(name, folder):
    save_image_model(name, folder)
    config = AsyncEngineArgs(model=str(folder), skip_tokenizer_init=True).create_engine_config().model_config
    return ImageEncoder(config, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("level", [1, 2])
def test_embeddings_after_a_sleep_are_those_of_before(level, tmp_path, monkeypatch):
    monkeypatch.setattr(encoder_memory, "release_memory", lambda _: None)
    encoder = encoder_of("qwen2_vl", tmp_path)
    image, _ = image_arrays(encoder._config, 1, seed=1)
    before = encoder.encode(image, 0, 1)
    encodings = ImageEncodings(encoder, lambda: None)
    memory = EncoderMemory(encoder, torch.device("cuda"), lambda: None, None, encodings)
    for _ in range(2):  # a release is idempotent
        (memory.offload_weights if level == 1 else memory.drop_weights)()
    assert not sum(each.untyped_storage().nbytes() for each in encoder.module.parameters())
    memory.restore_weights()
    memory.restore_weights()
    assert torch.equal(encoder.encode(image, 0, 1), before)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_largest_image_is_encoded_with_a_beat_for_each_layer(name, tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_mp.core.images.encoder.MAX_IMAGE_BYTES", 2**16)
    encoder = encoder_of(name, tmp_path)
    encoder.encode_largest()
    beats = []
    encoder.encode(image_arrays(encoder._config, 1, seed=1)[0], 0, 1, lambda: beats.append(1))
    assert len(beats) >= 2
