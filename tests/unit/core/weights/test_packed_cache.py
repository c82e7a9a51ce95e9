"""Packed weights in the model cache: a core that maps them computes the same, and nothing about them fails a start."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paged_steps import run_in_chunks
from support.random_encoders import CLASSIFIERS, random_encoder

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.models.loader import load_model
from vllm_mp.core.weights import packed_cache
from vllm_mp.core.weights.packed_cache import find_packed, fork_writer, packed_path, store_packed
from vllm_mp.core.weights.packed_file import PackedWeights
from vllm_mp.kernels.cpu.library import library
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread", "small_models_are_kept"),
    pytest.mark.skipif(library() is None, reason="the kernels are not built"),
]
PROMPTS = random_prompts((33, 5))


@pytest.fixture
def small_models_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "_MIN_BYTES", 0)


@pytest.fixture
def folder(tmp_path) -> Path:
    path: Path = tmp_path / "model"
    save_random_model(CONFIGS["llama"], path)
    return path


def config_of(folder: Path, **options: Any) -> Any:
    return AsyncEngineArgs(str(folder), skip_tokenizer_init=True, **options).create_engine_config().model_config


def load(config: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, list[tuple[Path, PackedWeights]]]:
    """Return a model, and what it would keep."""
    kept: list[tuple[Path, PackedWeights]] = []
    model = load_model(config, dtype, torch.device("cpu"), keep_packed=lambda *parts: kept.append(parts))
    return model, kept


def load_and_store(config: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Path]:
    model, [(path, weights)] = load(config, dtype)
    store_packed(path, weights)
    return model, path


def no_packing(*arguments: Any) -> Any:
    raise AssertionError("a matrix is packed again")


CASES = [
    ("llama-tied", "int8", torch.float32),
    ("qwen2", None, torch.bfloat16),
    ("gpt2", None, torch.float32),
    ("mixtral", None, torch.bfloat16),
    ("qwen2-moe", "int8", torch.float32),
    ("gemma3", None, torch.bfloat16),
    ("olmo2", "int8", torch.bfloat16),
]


@pytest.mark.parametrize(("name", "quantization", "dtype"), CASES)
def test_mapped_weights_give_the_same_logits_and_nothing_is_packed_again(
    name, quantization, dtype, tmp_path, monkeypatch
):
    save_random_model(CONFIGS[name], tmp_path / "model")
    config = config_of(tmp_path / "model", quantization=quantization)
    packed, path = load_and_store(config, dtype)
    monkeypatch.setattr("vllm_mp.kernels.cpu.packed.note_form", no_packing)
    monkeypatch.setattr("vllm_mp.core.models.loader.load_weights", no_packing)
    mapped, kept = load(config, dtype)
    assert kept == []
    assert mapped.num_parameters == packed.num_parameters
    got, expected = (torch.cat(run_in_chunks(each, PROMPTS, block_size=4, dtype=dtype)) for each in (mapped, packed))
    assert torch.equal(got, expected)
    assert any(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert path.stat().st_mode & 0o077 == 0


def test_mapped_classifier_in_bfloat16_keeps_the_float32_weights_of_its_head(tmp_path):
    random_encoder(*CLASSIFIERS["roberta"], tmp_path / "model")
    config = config_of(tmp_path / "model")
    packed, _ = load_and_store(config, torch.bfloat16)
    mapped, kept = load(config, torch.bfloat16)
    assert kept == []
    states = torch.randn(3, 48)
    assert torch.equal(mapped.classify(states), packed.classify(states))


def test_other_weights_dtype_or_quantization_is_another_file(folder):
    paths = [packed_path(config_of(folder), dtype) for dtype in (torch.float32, torch.bfloat16)]
    paths.append(packed_path(config_of(folder, quantization="int8"), torch.float32))
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    paths.append(packed_path(config_of(folder), torch.float32))
    assert None not in paths
    assert len(set(paths)) == len(paths)
    assert packed_path(config_of(folder, load_format="dummy"), torch.float32) is None


@pytest.mark.parametrize("damage", ["cut", "header", "other model", "readable"])
def test_file_that_cannot_be_used_is_removed_and_the_models_own_files_are_read(damage, folder, tmp_path, caplog):
    config = config_of(folder)
    model, path = load_and_store(config)
    content = path.read_bytes()
    if damage == "cut":
        os.truncate(path, len(content) // 2)
    elif damage == "header":
        path.write_bytes(content[:16] + b"\xff" * 64 + content[80:])
    elif damage == "other model":
        save_random_model(CONFIGS["qwen2"], tmp_path / "other")
        _, other = load_and_store(config_of(tmp_path / "other"))
        other.rename(path)
    else:
        path.chmod(0o644)
    read, kept = load(config)
    assert len(kept) == 1
    assert not path.exists()
    assert "packed weights" in caplog.text
    got, expected = (torch.cat(run_in_chunks(each, PROMPTS, block_size=4)) for each in (read, model))
    assert torch.equal(got, expected)


def test_least_recently_used_files_make_room_and_a_limit_of_0_keeps_nothing(folder, monkeypatch):
    configs = [config_of(folder, quantization=quantization) for quantization in (None, "int8")]
    _, first = load_and_store(configs[0])
    _, second = load_and_store(configs[1])
    os.utime(second, (1, 1))
    os.utime(first, (0, 0))
    assert find_packed(first) is not None  # which is a use
    (first.parent / ".killed.partial").touch()
    _, [(third, weights)] = load(configs[0], torch.bfloat16)
    size = first.stat().st_size + 2 * weights.num_bytes
    monkeypatch.setenv("VLLM_MP_PACKED_CACHE_GIB", str(size / 2**30))
    store_packed(third, weights)
    assert sorted(first.parent.iterdir()) == sorted([first, third])
    monkeypatch.setenv("VLLM_MP_PACKED_CACHE_GIB", "0")
    assert packed_path(configs[0], torch.float32) is None


def test_forked_process_writes_the_file_and_a_folder_that_cannot_be_written_is_no_error(folder, caplog):
    config = config_of(folder)
    _, kept = load(config)
    [(path, _)] = kept
    path.parent.parent.mkdir()
    path.parent.touch()  # a file in the place of the folder
    store_packed(*kept[0])
    assert not path.exists()
    path.parent.unlink()
    fork_writer(kept)
    _, status = os.wait()
    assert status == 0
    assert find_packed(path) is not None
