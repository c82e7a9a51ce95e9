"""What other files of a model's folder add to config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.model_config.quantization import FourBits
from vllm_mp.model_store.hf_config import read_hf_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GPTQ = {"bits": 4, "group_size": 64, "desc_act": True, "sym": True, "model_file_base_name": "gptq_model-4bit-64g"}
AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "content", "four_bits"),
    [
        ("quantize_config.json", GPTQ, FourBits("gptq", 64, True, 1)),
        ("quantize_config.json", {**GPTQ, "quant_method": "gptq", "checkpoint_format": "gptq_v2"}, None),
        ("quant_config.json", AWQ, FourBits("awq", 32)),
        ("quantize_config.json", {**AWQ, "q_group_size": -1}, FourBits("awq", 0)),
    ],
)
def test_quantization_that_only_a_file_of_its_own_describes_is_read(
    tmp_path: Path, file: str, content: dict[str, Any], four_bits: FourBits | None
) -> None:
    write(tmp_path / "config.json", LLAMA)
    write(tmp_path / file, content)
    arch: Any = read_architecture(read_hf_config(tmp_path, "auto"))
    assert arch.four_bits == (four_bits or FourBits("gptq", 64, True, 0))


def test_quantization_in_the_configuration_takes_precedence(tmp_path: Path) -> None:
    stated = {"quant_method": "awq", "bits": 4, "group_size": 128}
    write(tmp_path / "quantize_config.json", GPTQ)
    write(tmp_path / "config.json", {**LLAMA, "quantization_config": stated})
    assert read_hf_config(tmp_path, "auto")["quantization_config"] == stated
    of_text = {**LLAMA, "text_config": {"quantization_config": stated}}
    write(tmp_path / "config.json", of_text)
    assert read_hf_config(tmp_path, "auto") == of_text


def test_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json; fetch"):
        read_hf_config(tmp_path, "auto")
    write(tmp_path / "config.json", LLAMA)
    (tmp_path / "quantize_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"quantize_config\.json is not valid JSON"):
        read_hf_config(tmp_path, "auto")
    write(tmp_path / "quantize_config.json", {**GPTQ, "is_marlin_format": True})
    with pytest.raises(ValueError, match="'is_marlin_format' is true; only GPTQ's own format"):
        read_architecture(read_hf_config(tmp_path, "dummy"))


def test_head_is_looked_for_only_where_weights_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / "config.json", LLAMA)
    assert read_hf_config(tmp_path, "auto") == LLAMA
    for content in (b"", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{}"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert read_hf_config(tmp_path, "auto") == LLAMA
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert read_hf_config(tmp_path, "auto")["architectures"] == ["LlamaModel"]
    assert read_hf_config(tmp_path, "dummy") == LLAMA
    write(tmp_path / "config.json", {**LLAMA, "tie_word_embeddings": True})
    assert read_hf_config(tmp_path, "auto") == {**LLAMA, "tie_word_embeddings": True}
