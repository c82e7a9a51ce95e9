"""The pooling that a model's folder prescribes, and the options that an encoder cannot serve."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_mp.config.engine_args import EngineArgs
from vllm_mp.model_config.pooling import PoolingConfig, read_max_seq_length, read_pooling_config

BERT = {
    "architectures": ["BertModel"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def module(kind: str, path: str = "") -> dict[str, str]:
    return {"path": path, "type": f"sentence_transformers.models.{kind}"}


TRANSFORMER, POOLING, NORMALIZE = module("Transformer"), module("Pooling", "1_Pooling"), module("Normalize", "2")


def folder_of(path: Path, modules: Any = None, pooling: Any = MEAN, bert: Any = None) -> Path:
    (path / "config.json").write_text(json.dumps(BERT))
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if bert is not None:
        (path / "sentence_bert_config.json").write_text(json.dumps(bert))
    return path


def config_of(folder: Path, **options: Any) -> Any:
    return EngineArgs(model=str(folder), load_format="dummy", **options).create_engine_config()


@pytest.mark.parametrize(("is_encoder", "pooling_type"), [(True, "mean"), (False, "last")])
def test_folder_without_modules_json_gets_the_pooling_of_its_kind_of_model(
    tmp_path: Path, is_encoder: bool, pooling_type: str
) -> None:
    assert read_pooling_config(tmp_path, is_encoder) == PoolingConfig(pooling_type=pooling_type, normalize=True)


@pytest.mark.parametrize(
    ("pooling", "pooling_type"),
    [
        (MEAN, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_pooling_of_the_folder_is_read(tmp_path: Path, pooling: Any, pooling_type: str) -> None:
    folder = folder_of(tmp_path, [TRANSFORMER, POOLING], pooling)
    assert read_pooling_config(folder, True) == PoolingConfig(pooling_type=pooling_type, normalize=False)


def test_normalize_module_switches_normalization_on(tmp_path: Path) -> None:
    assert read_pooling_config(folder_of(tmp_path, [TRANSFORMER, POOLING, NORMALIZE]), True).normalize


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        ([TRANSFORMER, POOLING, module("Dense", "2_Dense")], MEAN, "Dense"),
        ([TRANSFORMER, module("Dense", "1_Dense"), POOLING, NORMALIZE], MEAN, "Dense"),
        ([TRANSFORMER], MEAN, "supported are Transformer, Pooling"),
        ([TRANSFORMER, NORMALIZE, POOLING], MEAN, "in this order"),
        ([{"path": "", "type": "custom_st.Transformer"}, POOLING], MEAN, "custom_st.Transformer"),
        ([module("Transformer", "0_Transformer"), POOLING], MEAN, "0_Transformer"),
        ([TRANSFORMER, module("Pooling", "../elsewhere")], MEAN, "not the name of a folder"),
        ([TRANSFORMER, module("Pooling", "..")], MEAN, "not the name of a folder"),
        ([TRANSFORMER, module("Pooling", "gone")], MEAN, "is missing"),
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "pooling max"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "weightedmean"}, "pooling weightedmean"),
        ([TRANSFORMER, POOLING], {**MEAN, "pooling_mode_cls_token": True}, r"cls \+ mean"),
        ([TRANSFORMER, POOLING], {}, r"\(none\)"),
        ([TRANSFORMER, POOLING], [], "holds a list"),
        ([1], MEAN, "without a 'type'"),
        ({}, MEAN, "holds a dict"),
    ],
)
def test_pooling_that_is_not_supported_is_refused_by_name(
    tmp_path: Path, modules: Any, pooling: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        config_of(folder_of(tmp_path, modules, pooling))
    assert str(tmp_path) in str(caught.value)


def test_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ValueError, match=r"modules\.json is not valid JSON"):
        read_pooling_config(tmp_path, True)


@pytest.mark.parametrize(
    ("bert", "message"),
    [
        ({"max_seq_length": 0}, "max_seq_length is 0"),
        ({"max_seq_length": "9"}, "max_seq_length is '9'"),
        ({"max_seq_length": True}, "max_seq_length is True"),
        ({"do_lower_case": True}, "do_lower_case is True"),
    ],
)
def test_bad_value_of_sentence_bert_config_is_refused(tmp_path: Path, bert: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_max_seq_length(folder_of(tmp_path, bert=bert))


@pytest.mark.parametrize(
    ("max_seq_length", "option", "context"), [(256, None, 256), (1024, None, 512), (None, None, 512), (256, 300, 300)]
)
def test_max_model_len_is_by_default_the_folders_max_seq_length(
    tmp_path: Path, max_seq_length: int | None, option: int | None, context: int
) -> None:
    folder = folder_of(tmp_path, bert={"max_seq_length": max_seq_length})
    assert config_of(folder, max_model_len=option).model_config.max_model_len == context


def test_encoder_computes_whole_prompts_with_one_block_each(tmp_path: Path) -> None:
    config = config_of(folder_of(tmp_path))
    assert config.cache_config.block_size == config.model_config.max_model_len == 512
    assert not config.cache_config.enable_prefix_caching
    assert not config.scheduler_config.enable_chunked_prefill
    assert config.model_config.architecture.kv_bytes_per_token(4) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_chunked_prefill": True}, "enable_chunked_prefill=True.*is an encoder"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching=True.*is an encoder"),
        ({"max_num_batched_tokens": 511, "max_num_seqs": 4}, "max_num_batched_tokens=511.*is an encoder"),
    ],
)
def test_option_that_an_encoder_cannot_serve_is_refused(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(folder_of(tmp_path), **options)
