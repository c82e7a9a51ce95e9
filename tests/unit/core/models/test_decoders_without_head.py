"""A checkpoint of a decoder without its head gives the hidden states of transformers, and no text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.paged_steps import run_in_chunks
from transformers import AutoModel, PhiConfig, PreTrainedConfig

from vllm_mp import AsyncEngineArgs
from vllm_mp.config import ModelConfig
from vllm_mp.core.models.loader import load_model
from vllm_mp.testing.random_models import CONFIGS, SIZES, TOKENS, random_prompts, save_random_model

OTHER = PhiConfig(**SIZES, **TOKENS, partial_rotary_factor=0.5)
"""A decoder without a native module."""


def save_without_head(config: PreTrainedConfig, folder: Path) -> Any:
    """Save a random decoder as `AutoModel` saves it, and return it."""
    save_random_model(config, folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def config_of(folder: Path) -> ModelConfig:
    return AsyncEngineArgs(model=str(folder), skip_tokenizer_init=True).create_engine_config().model_config


def assert_same_states(theirs: Any, folder: Path) -> None:
    ours: Any = load_model(config_of(folder), torch.float32, torch.device("cpu"))
    ours.compute_logits = lambda hidden: hidden
    prompts = random_prompts((33, 5))
    for prompt, got in zip(prompts, run_in_chunks(ours, prompts, block_size=4), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).last_hidden_state[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("config", [CONFIGS[name] for name in ("qwen2", "llama-tied", "gemma3", "gpt2")] + [OTHER])
def test_hidden_states_of_a_checkpoint_without_a_head_are_those_of_transformers(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    theirs = save_without_head(config, tmp_path)
    model = config_of(tmp_path)
    assert model.hf_config["architectures"] == [type(theirs).__name__]
    assert model.supported_tasks == ["embed"]
    assert_same_states(theirs, tmp_path)


@pytest.mark.parametrize("max_shard_size", ["1GB", "50KB"])
def test_checkpoint_that_lacks_the_head_that_its_configuration_promises_gives_vectors(
    max_shard_size: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random_model(CONFIGS["qwen3"], tmp_path, max_shard_size=max_shard_size)
    theirs = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for path in tmp_path.glob("*.safetensors"):
        save_file({name: value for name, value in load_file(path).items() if name != "lm_head.weight"}, path)
    index = tmp_path / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text())
        del content["weight_map"]["lm_head.weight"]
        index.write_text(json.dumps(content))
    assert config_of(tmp_path).supported_tasks == ["embed"]
    assert "has no weights of a head (lm_head.weight), so the model runs as Qwen3Model" in caplog.text
    assert_same_states(theirs, tmp_path)


def test_missing_head_in_a_pickle_is_an_error_that_says_how_to_get_vectors(tmp_path: Path) -> None:
    save_random_model(CONFIGS["llama"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(
        {name: value for name, value in weights.items() if name != "lm_head.weight"}, tmp_path / "pytorch_model.bin"
    )
    with pytest.raises(
        ValueError, match=r'missing lm_head\.weight\. If .* vectors, write "architectures": \["LlamaModel"\]'
    ):
        load_model(config_of(tmp_path), torch.float32, torch.device("cpu"))


def test_head_in_a_checkpoint_that_is_named_without_a_head_is_not_read(tmp_path: Path) -> None:
    save_random_model(CONFIGS["llama"], tmp_path)
    theirs = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    assert_same_states(theirs, tmp_path)
