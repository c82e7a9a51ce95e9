"""Weights in .bin files are loaded as safetensors are, and nothing in such a file runs."""

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.models.loader import load_model
from vllm_mp.core.weights.digest import model_digest
from vllm_mp.core.weights.pickled_tensors import read_pickled
from vllm_mp.testing.random_models import CONFIGS, GPT2_SIZES, save_random_model

SHARDS = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")


def config_of(folder):
    return AsyncEngineArgs(str(folder), skip_tokenizer_init=True, device="cpu").create_engine_config().model_config


def loaded(folder):
    return load_model(config_of(folder), torch.float32, torch.device("cpu")).state_dict()


def save_pickled(folder, tensors, **options):
    """Replace the safetensors in `folder` by a pickle of `tensors`."""
    for path in folder.glob("*.safetensors"):
        path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin", **options)


@pytest.fixture(scope="module")
def dialogue(tmp_path_factory):
    """The folder of a GPT-2 with safetensors, and its tensors as the .bin of DialoGPT has them."""
    folder = tmp_path_factory.mktemp("dialogue")
    model = save_random_model(GPT2Config(**GPT2_SIZES), folder)
    tensors = OrderedDict(model.state_dict())
    assert all(name.startswith(("transformer.", "lm_head.")) for name in tensors)
    causal = torch.tril(torch.ones(128, 128, dtype=torch.uint8)).view(1, 1, 128, 128)
    for layer in range(GPT2_SIZES["n_layer"]):
        tensors[f"transformer.h.{layer}.attn.bias"] = causal
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return folder, tensors


@pytest.mark.parametrize("is_zip", [True, False], ids=["mapped", "before torch 1.6"])
def test_gpt2_in_the_layout_of_dialogpt_loads_as_from_safetensors(dialogue, tmp_path, is_zip):
    folder, tensors = dialogue
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_pickled(tmp_path, tensors, _use_new_zipfile_serialization=is_zip)
    assert zipfile.is_zipfile(tmp_path / "pytorch_model.bin") == is_zip
    expected, found = loaded(folder), loaded(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["llama", "gpt2-scaled"])
def test_shards_with_an_index_load_as_from_safetensors(tmp_path, name):
    tensors = save_random_model(CONFIGS[name], tmp_path).state_dict()
    expected = loaded(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = dict(zip(SHARDS, (names[::2], names[1::2]), strict=True))
    for file, part in parts.items():
        torch.save({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = loaded(tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of the 2 files that pytorch_model\.bin\.index\.json names"):
        config_of(tmp_path)


def test_safetensors_are_preferred_and_the_pickle_is_not_opened(tmp_path):
    save_random_model(CONFIGS["llama"], tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    assert loaded(tmp_path)


def test_parameters_in_a_pickle_load_as_tensors(tmp_path):
    tensors = save_random_model(CONFIGS["llama"], tmp_path).state_dict()
    expected = loaded(tmp_path)
    save_pickled(tmp_path, {name: torch.nn.Parameter(value) for name, value in tensors.items()})
    found = loaded(tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(value.requires_grad for value in read_pickled(tmp_path / "pytorch_model.bin").values())


def test_mapped_tensors_take_no_memory_until_they_are_read(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"x": torch.zeros(2**20)}, path)
    tensor = read_pickled(path)["x"]
    mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    assert any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in (r.split("-") for r in mapped))


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_code_in_a_pickle_does_not_run_and_is_refused_by_name(tmp_path, is_zip):
    save_random_model(CONFIGS["llama"], tmp_path)
    mark = tmp_path / "mark"
    save_pickled(tmp_path, {"x": torch.ones(1), "y": Payload(mark)}, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not loaded.*(posix|os)\.system.*safetensors"):
        loaded(tmp_path)
    assert not mark.exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert mark.exists(), "the payload works where code may run"


@pytest.mark.parametrize("name", ["model.bin", "consolidated.00.pth", "model.pt", "model.ckpt", "weights.pkl"])
def test_other_pickles_are_refused_without_being_opened(tmp_path, name):
    save_random_model(CONFIGS["llama"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    mark = tmp_path / "mark"
    (tmp_path / name).write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(ValueError, match=rf"weights only as {name}, a pickle, which can run code.*Convert it"):
        config_of(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([torch.ones(1)], "holds a list, not a dict of tensors"),
        ({"state_dict": {"x": torch.ones(1)}}, "holds 'state_dict' of dict"),
        ({"x": torch.eye(2).to_sparse()}, "holds 'x' of Tensor, where only plain tensors"),
        ({"x": torch.empty(2, device="meta")}, "holds 'x' of Tensor, where only plain tensors"),
        ({3: torch.ones(1)}, "holds 3 of Tensor"),
    ],
    ids=["list", "nested", "sparse", "meta", "name"],
)
def test_pickle_of_something_else_than_named_tensors_is_refused(tmp_path, content, why):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=why):
        read_pickled(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("kept", [0, 1, 60, -100, -1])
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_truncated_pickle_is_named(tmp_path, is_zip, kept):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"x": torch.ones(1000)}, path, _use_new_zipfile_serialization=is_zip)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is (damaged or incomplete|not loaded: it is damaged)"):
        read_pickled(path)


def test_digest_tells_pickles_with_other_weights_apart(dialogue, tmp_path):
    folder, tensors = dialogue
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_pickled(tmp_path, tensors)
    before = model_digest(config_of(tmp_path)).weights
    assert model_digest(config_of(tmp_path)).weights == before
    other = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_pickled(tmp_path, other)
    assert model_digest(config_of(tmp_path)).weights != before
