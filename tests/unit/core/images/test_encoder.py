"""The embeddings of images, beside those of transformers, and arrays that no encoder takes."""

import json
import os

import numpy as np
import pytest
import torch
from support.image_gguf import F16, F32, Q8_0, make_half_model, rounded, write_mmproj, write_text_part
from support.image_models import image_tokenizer

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.images.encoder import ImageEncoder
from vllm_mp.core.images.image_store import ImageStore
from vllm_mp.core.images.request_images import RequestImages
from vllm_mp.core.models.loader import load_model
from vllm_mp.core.weights.checkpoint import CheckpointMismatchError
from vllm_mp.core.weights.digest import weights_digest
from vllm_mp.model_config.images import read_image_config
from vllm_mp.model_store import gguf
from vllm_mp.requests.images import ImageArray, PlacedImage, ProcessedImage
from vllm_mp.testing.image_models import IMAGE_MODELS, image_arrays, save_image_model
from vllm_mp.validation.image_validation import ImageShape, image_shape


@pytest.fixture(params=IMAGE_MODELS)
def saved(request, tmp_path):
    hub_model = save_image_model(request.param, tmp_path)
    return hub_model, AsyncEngineArgs(model=str(tmp_path), dtype="float32", skip_tokenizer_init=True)


def encoder_of(args):
    return ImageEncoder(args.create_engine_config().model_config, torch.float32, torch.device("cpu"))


def test_embeddings_are_those_of_transformers(saved):
    hub_model, args = saved
    encoder = encoder_of(args)
    for num_tiles in (1, 6) if encoder._config.has_many_tiles else (1,):
        image, tensors = image_arrays(encoder._config, num_tiles, seed=num_tiles)
        expected = torch.cat(list(hub_model.model.get_image_features(**tensors).pooler_output))
        shape, beats = encoder.shape_of(image), []
        assert shape.num_tiles == num_tiles
        got = encoder.encode(image, 0, num_tiles, lambda beats=beats: beats.append(1))
        assert len(beats) >= 2 * num_tiles, "each tower has at least two layers"
        assert got.shape == (num_tiles * shape.tile_tokens, 48)
        torch.testing.assert_close(got, expected.flatten(0, -2), atol=1e-5, rtol=1e-4)
        assert torch.equal(encoder.encode(image, num_tiles - 1, num_tiles), got[-shape.tile_tokens :])


def test_text_part_answers_as_transformers(saved):
    hub_model, args = saved
    config = args.create_engine_config().model_config
    model = load_model(config, torch.float32, torch.device("cpu"))
    ids = torch.arange(5, 14)
    embeds = hub_model.get_input_embeddings()(ids)
    torch.testing.assert_close(model.embed_input_ids(ids), embeds)
    assert model.num_parameters < sum(each.numel() for each in hub_model.parameters())


def convert_no_tokenizer(source, target, lock, progress):
    """Write no more of a tokenizer than the special tokens of images."""
    target.mkdir()
    names = (
        *("<image>", "<fake_token_around_image>"),
        *("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        *("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    )
    tokens = [{"content": text, "id": 90 + i} for i, text in enumerate(names)]
    (target / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))


@pytest.mark.parametrize(
    ("family", "kind"),
    [("smolvlm", F16), ("llava", F32), ("idefics3", Q8_0), ("gemma3", F32), ("qwen2_vl", F32), ("qwen2_5_vl", F32)],
)
def test_gguf_files_give_the_embeddings_of_their_weights(family, kind, tmp_path, monkeypatch):
    model = make_half_model(family, 90)
    write_text_part(tmp_path / "text.gguf", model, image_tokenizer(), num_tokens=97)
    write_mmproj(tmp_path / "mmproj.gguf", model, kind=kind)
    monkeypatch.setattr(gguf, "_convert_tokenizer", convert_no_tokenizer)
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "cache"))
    args = AsyncEngineArgs(model=str(tmp_path), dtype="float32", skip_tokenizer_init=True)
    encoder = encoder_of(args)
    if kind != F32:
        rounded(model, kind)
    image, tensors = image_arrays(encoder._config, 1, seed=1)
    expected = torch.cat(list(model.model.get_image_features(**tensors).pooler_output))
    torch.testing.assert_close(encoder.encode(image, 0, 1), expected.flatten(0, -2), atol=1e-5, rtol=1e-4)
    config = args.create_engine_config().model_config
    os.utime(tmp_path / "mmproj.gguf", (1, 1))
    with pytest.raises(ValueError, match=r"mmproj\.gguf was changed or replaced"):
        ImageEncoder(config, torch.float32, torch.device("cpu"))


def test_digest_of_gguf_files_covers_the_image_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "_convert_tokenizer", convert_no_tokenizer)
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "cache"))
    model = make_half_model("llava", 90)
    write_text_part(tmp_path / "text.gguf", model, image_tokenizer(), num_tokens=97)
    digests = []
    for factor in (1, 2, 2):
        model.model.multi_modal_projector.linear_2.bias.data *= factor
        write_mmproj(tmp_path / "mmproj.gguf", model)
        model.model.multi_modal_projector.linear_2.bias.data /= factor
        args = AsyncEngineArgs(model=str(tmp_path), dtype="float32", skip_tokenizer_init=True)
        digests.append(weights_digest(args.create_engine_config().model_config))
    assert digests[0] != digests[1] == digests[2]


def test_weights_that_do_not_fit_are_named(tmp_path):
    save_image_model("smolvlm", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = AsyncEngineArgs(model=str(tmp_path), dtype="float32", skip_tokenizer_init=True)
    with pytest.raises(CheckpointMismatchError, match=r"missing vision_model\.encoder\.layers\.2"):
        encoder_of(args)
    encoder_of(AsyncEngineArgs(model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True))


def changed(image, changed_name, /, **fields):
    arrays = [
        ImageArray(**({"name": each.name, "dtype": each.dtype, "shape": each.shape, "data": each.data} | fields))
        if each.name == changed_name
        else each
        for each in image.arrays
    ]
    return ProcessedImage(image.digest, arrays)


WRONG = {
    "other names": (lambda image: changed(image, "pixel_values", name="pixels"), "must have the arrays"),
    "no arrays": (lambda image: ProcessedImage(image.digest, []), "got none"),
    "another dtype": (lambda image: changed(image, "pixel_values", dtype="float16"), "must be float32"),
    "another size": (lambda image: changed(image, "pixel_values", shape=[1, 2, 3, 16, 64]), "must be float32"),
    "too few bytes": (lambda image: changed(image, "pixel_values", data=b"1234"), "got 4 bytes"),
    "no tiles": (lambda image: changed(image, "pixel_values", shape=[1, 0, 3, 32, 32], data=b""), "must be float32"),
    "a mask without an image": (
        lambda image: changed(image, "pixel_attention_mask", data=bytes(16384)),
        "must begin with an image",
    ),
    "a mask of other tiles": (
        lambda image: changed(image, "pixel_attention_mask", shape=[1, 1, 32, 32], data=bytes(8192)),
        "each of 2 tiles",
    ),
}


@pytest.mark.parametrize("grid", [(2, 4, 4), (1, 3, 4), (1, 0, 4), (1, 4, 6), (1, -4, -4), (1, 2**40, 2)])
def test_grid_that_is_not_that_of_the_patches_is_refused(grid):
    config = read_image_config({"model_type": "qwen2_vl", "vision_config": {"patch_size": 4}})
    image, _ = image_arrays(config, 1, seed=1)
    assert image_shape(image, config) == ImageShape(1, 8, 2)
    with pytest.raises(ValueError, match=r"image_grid_thw must be|pixel_values must be float32"):
        image_shape(changed(image, "image_grid_thw", data=np.array(grid).tobytes()), config)
    with pytest.raises(ValueError, match="must have image_grid_thw"):
        image_shape(changed(image, "image_grid_thw", shape=[3]), config)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smolvlm")
    save_image_model("smolvlm", folder)
    encoder = encoder_of(AsyncEngineArgs(model=str(folder), dtype="float32", skip_tokenizer_init=True))
    return encoder, ImageStore(encoder.shape_of, 48 * 4, 2**20)


@pytest.mark.parametrize("case", WRONG)
def test_arrays_that_the_encoder_does_not_take_are_refused_by_the_requests_that_name_them(case, store):
    encoder, images = store
    image, _ = image_arrays(encoder._config, 2, seed=1)
    change, error = WRONG[case]
    images.put(7, change(image))
    found, missing = images.find(7, [PlacedImage(image.digest, [(0, 8)])])
    images.drop_client(7)
    assert not missing
    with pytest.raises(ValueError, match=error):
        RequestImages([PlacedImage(image.digest, [(0, 8)])], found, 20)


@pytest.mark.parametrize("value", [0, np.nan, np.inf])
def test_tile_that_no_processor_makes_is_not_a_number_and_changes_no_other(value, store):
    encoder, _ = store
    image, _ = image_arrays(encoder._config, 3, seed=1)
    pixels = np.frombuffer(image.arrays[0].data, np.float32).reshape(3, -1).copy()
    pixels[1] = value
    wrong = changed(image, "pixel_values", data=pixels.tobytes())
    assert encoder.shape_of(wrong) == ImageShape(3, 4)
    right, got = (encoder.encode(each, 0, 3).view(3, 4, -1) for each in (image, wrong))
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], right[[0, 2]])


def test_tile_that_is_zero_in_the_dtype_of_the_model_alone_is_not_a_number(tmp_path):
    """transformers drops such a tile of Idefics3 as padding."""
    save_image_model("idefics3", tmp_path)
    config = AsyncEngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config().model_config
    encoder = ImageEncoder(config, torch.bfloat16, torch.device("cpu"))
    image, _ = image_arrays(encoder._config, 2, seed=1)
    pixels = np.frombuffer(image.arrays[0].data, np.float32).reshape(2, -1).copy()
    pixels[0] = 1e-41
    got = encoder.encode(changed(image, "pixel_values", data=pixels.tobytes()), 0, 2).view(2, 4, -1)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()
