"""The digest by which a client tells whether the next core serves the same model."""

import json
import os
import shutil

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_mp import EngineArgs
from vllm_mp.client.cores.sources.core_source import ServedModel, model_limits
from vllm_mp.core.weights.digest import model_digest
from vllm_mp.wire import NO_DIGEST, ModelDigest


@pytest.fixture
def folder(small_model, tmp_path):
    """A copy of a small model."""
    return shutil.copytree(small_model, tmp_path / "model")


def config_of(folder, **options):
    return EngineArgs(model=str(folder), **{"dtype": "float32", **options}).create_engine_config()


def digest_of(folder, **options):
    return model_digest(config_of(folder, **options).model_config)


def changed(before, after):
    return {name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name)}


def test_digest_is_of_the_content_and_not_of_the_files(folder, tmp_path):
    before = digest_of(folder)
    assert all(msgspec.structs.astuple(before))
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    assert digest_of(folder.rename(tmp_path / "elsewhere")) == before


def test_any_tensor_that_was_trained_changes_the_weights(folder):
    before = digest_of(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in sorted(tensors)[:: max(1, len(tensors) // 4)]:
        save_file({**tensors, name: tensors[name] + torch.randn_like(tensors[name]).to(tensors[name].dtype)}, path)
        assert changed(before, digest_of(folder)) == {"weights"}
    save_file(tensors, path)
    assert digest_of(folder) == before


def test_other_parts_of_a_model_change_their_own_digest(folder):
    before = digest_of(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}, indent=3))
    assert digest_of(folder) == before
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert changed(before, digest_of(folder)) == {"config"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("another")
    assert changed(before, digest_of(folder)) == {"tokenizer"}


def test_dummy_weights_differ_by_their_seed(folder):
    dummy = digest_of(folder, load_format="dummy", seed=1)
    assert dummy == digest_of(folder, load_format="dummy", seed=1)
    assert changed(dummy, digest_of(folder, load_format="dummy", seed=2)) == {"weights"}
    assert changed(dummy, digest_of(folder)) == {"weights"}


def test_differences_are_named_with_their_values(folder):
    def served(seed, **options):
        config = config_of(folder, load_format="dummy", seed=seed, **options)
        return ServedModel(model_digest(config.model_config), model_limits(config))

    def changes(new):
        return served(1, max_model_len=64).changes(new, with_tokenizer=True)

    assert changes(served(1, max_model_len=64)) == []
    assert changes(served(2, max_model_len=64)) == ["other weights"]
    new = served(1, max_model_len=32, dtype="bfloat16")
    assert changes(new) == ["dtype bfloat16 instead of float32", "max_model_len 32 instead of 64"]


def test_tokenizer_counts_on_demand_and_a_model_without_weights_differs_in_its_limits_alone():
    model = ServedModel(ModelDigest("weights", "config", "tokenizer"), {"dtype": "float32"})
    other = ServedModel(ModelDigest("weights", "config", "other"), {"dtype": "float32"})
    assert model.changes(other, with_tokenizer=True) == ["other tokenizer"]
    assert model.changes(other, with_tokenizer=False) == []
    asleep = ServedModel(NO_DIGEST, {"dtype": "float16"})
    assert model.changes(asleep, with_tokenizer=True) == ["dtype float16 instead of float32"]
