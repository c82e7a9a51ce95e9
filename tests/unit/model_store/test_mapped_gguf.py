"""A GGUF file of a known family keeps its weights: its folder holds configuration, tokenizer and the file's path."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
from support.tiny_gguf import split, write_random_gguf, write_tiny_gguf
from transformers import MixtralConfig, Phi3Config, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from vllm_mp import AsyncEngineArgs
from vllm_mp.client.cores.sources.launcher import CoreLauncher
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.model_store import gguf, resolve_model
from vllm_mp.model_store.entries import cache_entries
from vllm_mp.model_store.gguf_file.config import family_of, read_gguf_config
from vllm_mp.model_store.gguf_file.reader import LongArray, read_gguf
from vllm_mp.model_store.own_names import give_name
from vllm_mp.model_store.progress import Progress

Entries = dict[str, tuple[object, gguf_package.GGUFValueType]]
UINT32, FLOAT32 = gguf_package.GGUFValueType.UINT32, gguf_package.GGUFValueType.FLOAT32


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose tokenizer was converted, which takes seconds."""
    converted: list[Path] = []

    def convert(source: Path, target: Path, lock: int, progress: Progress) -> None:
        converted.append(source)
        target.mkdir()
        (target / "tokenizer.json").touch()

    monkeypatch.setattr(gguf, "_convert_tokenizer", convert)
    return converted


def test_folder_has_configuration_and_tokenizer_and_no_weights(tmp_path: Path, tokenizers: list[Path]) -> None:
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(source)
    folder = resolve_model(str(source))
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "gguf_file.json", "tokenizer.json"]
    architecture = read_architecture(json.loads((folder / "config.json").read_text()))
    assert (architecture.name, architecture.vocab_size, architecture.hidden_size) == ("LlamaForCausalLM", 12, 64)
    mapped = gguf.mapped_gguf(folder)
    assert mapped is not None
    assert mapped.read() == read_gguf(source)
    assert resolve_model(str(source)) == folder
    assert tokenizers == [source]


def test_quantization_gguf_is_taken_with_gguf_files_and_refused_with_others(
    tmp_path: Path, tokenizers: list[Path]
) -> None:
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(source)

    def model(folder: Path) -> Any:
        return AsyncEngineArgs(str(folder), quantization="gguf", skip_tokenizer_init=True, load_format="dummy")

    assert model(source).create_engine_config().model_config.quantization is None
    folder = tmp_path / "other"
    folder.mkdir()
    shutil.copy(resolve_model(str(source)) / "config.json", folder)
    with pytest.raises(ValueError, match=r"quantization='gguf' needs a GGUF file, and .*other is none; name a \.gguf"):
        model(folder).create_engine_config()
    (folder / gguf.CONVERTED_FILE).touch()
    assert model(folder).create_engine_config().model_config.quantization is None


def test_moved_file_keeps_its_tokenizer_and_written_file_gets_another_folder(
    tmp_path: Path, tokenizers: list[Path]
) -> None:
    source, moved = tmp_path / "tiny.gguf", tmp_path / "elsewhere.gguf"
    write_tiny_gguf(source)
    first = resolve_model(str(source))
    source.rename(moved)
    second = resolve_model(str(moved))
    assert first != second
    assert len(tokenizers) == 1

    write_tiny_gguf(moved, seed=1)
    mapped = gguf.mapped_gguf(second)
    assert mapped is not None
    with pytest.raises(ValueError, match=r"elsewhere\.gguf was changed or replaced after the engine found it; start"):
        mapped.read()
    assert resolve_model(str(moved)) != second


def test_mapped_file_is_listed_with_the_type_of_its_weights(
    tmp_path: Path, cache: Path, tokenizers: list[Path]
) -> None:
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(source)
    resolve_model(str(source))
    (entry,) = cache_entries(cache, tmp_path / "hub")
    assert (entry.name, entry.format) == ("tiny", "GGUF, F32")
    source.unlink()
    (entry,) = cache_entries(cache, tmp_path / "hub")
    assert entry.format == "GGUF, missing or changed"


def test_name_of_a_file_finds_the_model_of_the_file(tmp_path: Path, cache: Path, tokenizers: list[Path]) -> None:
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(source)
    give_name("mine", source)
    assert resolve_model("mine") == resolve_model(str(source))
    [entry] = [entry for entry in cache_entries(cache, tmp_path / "hub") if entry.target is not None]
    assert (entry.name, entry.format, entry.target) == ("mine", "GGUF", source)


def test_folder_of_a_replaced_file_is_removed_after_a_day_without_use(tmp_path: Path, tokenizers: list[Path]) -> None:
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(source)
    first = resolve_model(str(source))
    write_tiny_gguf(source, seed=1)
    second = resolve_model(str(source))
    assert first.exists()
    os.utime(first, (0, time.time() - 25 * 3600))
    assert resolve_model(str(source)) == second
    assert not first.exists()


def test_folder_of_a_running_engine_is_kept_until_the_engine_ends(tmp_path: Path, tokenizers: list[Path]) -> None:
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(source)
    first = resolve_model(str(source))
    launcher = CoreLauncher(AsyncEngineArgs(str(source), skip_tokenizer_init=True).create_engine_config())
    write_tiny_gguf(source, seed=1)
    os.utime(first, (0, time.time() - 25 * 3600))
    resolve_model(str(source))
    assert first.exists()
    launcher.close(None, None)
    resolve_model(str(source))
    assert not first.exists()


def metadata_file(
    path: Path,
    entries: Entries,
    tensors: dict[str, object] = {},  # noqa: B006
    architecture: str = "llama",
) -> Path:
    """Write a model with these entries in place of those of `write_tiny_gguf`, and these tensors beside its tensors."""
    plain = path.with_name("plain.gguf")
    write_tiny_gguf(plain, architecture)
    return copied(plain, path, entries, tensors, architecture)


def copied(
    source: Path,
    path: Path,
    entries: Entries,
    tensors: dict[str, object] = {},  # noqa: B006
    architecture: str = "llama",
    left_out: set[str] = set(),  # noqa: B006
) -> Path:
    """Write the model in `source` with these entries in place of its own, and these tensors beside its tensors.

    Entries of the architecture that are `left_out` are not written.
    """
    reader = gguf_package.GGUFReader(source)
    writer = gguf_package.GGUFWriter(path, architecture)
    for key, field in reader.fields.items():
        if key.startswith(f"{architecture}.") and key not in entries and key not in left_out:
            writer.add_key_value(key, field.contents(), field.types[0])
    for key, (value, kind) in entries.items():
        writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config_of(path: Path) -> dict[str, object]:
    file = read_gguf(path)
    family = family_of(file)
    assert family is not None
    return read_gguf_config(file, family)


def test_rotary_scaling_is_read_from_metadata_and_from_factors(tmp_path: Path) -> None:
    string = gguf_package.GGUFValueType.STRING
    scaling: Entries = {
        "llama.rope.scaling.type": ("yarn", string),
        "llama.rope.scaling.factor": (4.0, FLOAT32),
        "llama.rope.scaling.original_context_length": (32, UINT32),
    }
    yarn = config_of(metadata_file(tmp_path / "a.gguf", scaling))["rope_parameters"]
    assert yarn == {
        "rope_theta": 10_000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }

    turns = 8192 / (2 * np.pi * 10_000.0 ** (np.arange(8) / 8))
    smooth = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    llama3 = config_of(metadata_file(tmp_path / "b.gguf", {}, {"rope_freqs.weight": factors}))["rope_parameters"]
    assert llama3 == {
        "rope_theta": 10_000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    odd = metadata_file(tmp_path / "c.gguf", {}, {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)})
    with pytest.raises(ValueError, match=r"c\.gguf: rope_freqs\.weight\[1\] is 1\.28\d*: .*Llama 3's rule"):
        config_of(odd)


def test_linear_scaling_is_read_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    linear = {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 4.0}
    for name, entries in {
        "without a type": {"llama.rope.scaling.factor": (4.0, FLOAT32)},
        "old key": {"llama.rope.scale_linear": (4.0, FLOAT32)},
    }.items():
        assert config_of(metadata_file(tmp_path / f"{name}.gguf", entries))["rope_parameters"] == linear
    none: Entries = {"llama.rope.scaling.factor": (0.0, FLOAT32)}
    plain = {"rope_theta": 10_000.0, "rope_type": "default"}
    assert config_of(metadata_file(tmp_path / "a.gguf", none))["rope_parameters"] == plain
    small: Entries = {"llama.rope.scale_linear": (0.5, FLOAT32)}
    with pytest.raises(
        ValueError, match=r"b\.gguf: llama\.rope\.scale_linear is 0\.5: .* number of at least 1; convert"
    ):
        config_of(metadata_file(tmp_path / "b.gguf", small))


def test_all_that_a_file_states_of_yarn_is_used(tmp_path: Path) -> None:
    prefix, string = "llama.rope.scaling", gguf_package.GGUFValueType.STRING
    yarn: Entries = {
        f"{prefix}.type": ("yarn", string),
        f"{prefix}.factor": (4.0, FLOAT32),
        f"{prefix}.yarn_attn_factor": (0.5, FLOAT32),
        f"{prefix}.yarn_beta_fast": (16.0, FLOAT32),
        f"{prefix}.yarn_beta_slow": (2.0, FLOAT32),
    }
    assert config_of(metadata_file(tmp_path / "a.gguf", yarn))["rope_parameters"] == {
        "rope_theta": 10_000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 0.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    }
    yarn[f"{prefix}.yarn_ext_factor"] = (0.0, FLOAT32)
    with pytest.raises(
        ValueError, match=r"b\.gguf: llama\.rope\.scaling\.yarn_ext_factor is 0\.0: only 1 is supported"
    ):
        config_of(metadata_file(tmp_path / "b.gguf", yarn))


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"])
@pytest.mark.parametrize("value", [(12, UINT32), (-1, gguf_package.GGUFValueType.INT32), (1.0, FLOAT32)])
def test_token_without_embedding_is_refused_by_field(tmp_path: Path, key: str, value: Any) -> None:
    path = metadata_file(tmp_path / "a.gguf", {f"tokenizer.ggml.{key}": value})
    with pytest.raises(ValueError, match=rf"a\.gguf: tokenizer\.ggml\.{key} is {value[0]}: .* id of one of 12 tokens"):
        config_of(path)


def test_vocabulary_with_more_tokens_than_embeddings_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf")
    file = read_gguf(tmp_path / "a.gguf")
    family = family_of(file)
    assert family is not None
    for tokens, count in ((["a"] * 13, 13), (LongArray(5000), 5000)):
        file.metadata["tokenizer.ggml.tokens"] = tokens
        with pytest.raises(ValueError, match=rf"tokens is 'a list of {count}': the tensors have embeddings of 12"):
            read_gguf_config(file, family)
    file.metadata["tokenizer.ggml.tokens"] = ["a"] * 11  # padded
    assert read_gguf_config(file, family)["vocab_size"] == 12


@pytest.mark.parametrize("first_has_tensors", [True, False])
def test_any_part_of_a_split_file_opens_all_parts(
    tmp_path: Path, tokenizers: list[Path], first_has_tensors: bool
) -> None:
    write_tiny_gguf(tmp_path / "whole.gguf")
    (tmp_path / "parts").mkdir()
    parts = split(tmp_path / "whole.gguf", tmp_path / "parts" / "tiny.gguf", 5, first_has_tensors=first_has_tensors)
    assert len(parts) == 3 if first_has_tensors else 4
    folder = resolve_model(str(parts[0]))
    assert [resolve_model(str(named)) for named in (*parts, parts[0].parent)] == [folder] * (len(parts) + 1)
    mapped = gguf.mapped_gguf(folder)
    assert mapped is not None
    whole, joined = read_gguf(tmp_path / "whole.gguf"), mapped.read()
    assert {name: tensor.shape for name, tensor in joined.tensors.items()} == {
        name: tensor.shape for name, tensor in whole.tensors.items()
    }
    architectures = [
        read_architecture(json.loads((found / "config.json").read_text()))
        for found in (folder, resolve_model(str(tmp_path / "whole.gguf")))
    ]
    assert architectures[0] == architectures[1]
    os.utime(parts[-1])
    with pytest.raises(ValueError, match=r"tiny-00001-of-.* was changed or replaced after the engine found it"):
        mapped.read()


def test_part_that_is_missing_or_of_another_file_is_named(tmp_path: Path, tokenizers: list[Path]) -> None:
    write_tiny_gguf(tmp_path / "whole.gguf")
    parts = split(tmp_path / "whole.gguf", tmp_path / "tiny.gguf", 5)
    content = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(ValueError, match=r"tiny-00003-of-00003\.gguf is one .* lacks tiny-00002-of-00003\.gguf: put"):
        resolve_model(str(parts[2]))
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ValueError, match=r"tiny-00002-of-00003\.gguf: split\.no is 2: by its name it must be 1"):
        resolve_model(str(parts[0]))
    (tmp_path / "renamed.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"renamed\.gguf: split\.count is 3: by its name it must be 1; parts of"):
        resolve_model(str(tmp_path / "renamed.gguf"))
    whole = metadata_file(tmp_path / "model-00001-of-00001.gguf", {})
    assert resolve_model(str(whole)).is_dir()


def test_kinds_of_gemma_layers_follow_llama_cpp_if_the_file_does_not_state_them(tmp_path: Path) -> None:
    window: Entries = {"gemma3.attention.sliding_window": (512, UINT32)}
    config = config_of(metadata_file(tmp_path / "a.gguf", window, architecture="gemma3"))
    assert (config["sliding_window"], config["layer_types"]) == (512, ["sliding_attention"])
    assert config["query_pre_attn_scalar"] == 16
    window["gemma3.attention.sliding_window_pattern"] = (1, UINT32)
    config = config_of(metadata_file(tmp_path / "b.gguf", window, architecture="gemma3"))
    assert config["layer_types"] == ["full_attention"]
    config = config_of(metadata_file(tmp_path / "c.gguf", {}, architecture="gemma3"))
    assert (config["sliding_window"], config["layer_types"]) == (None, ["full_attention"])
    config = config_of(metadata_file(tmp_path / "d.gguf", {}, architecture="gemma2"))
    assert (config["sliding_window"], config["attn_logit_softcapping"]) == (4096, 50.0)
    window["gemma3.attention.sliding_window_pattern"] = (0, UINT32)
    with pytest.raises(ValueError, match=r"e\.gguf: gemma3\.attention\.sliding_window_pattern is 0: it must be an"):
        config_of(metadata_file(tmp_path / "e.gguf", window, architecture="gemma3"))


def test_longrope_is_read_from_the_tensors_of_a_file_of_phi_3(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
        "short_factor": [1.0] * 6,
        "long_factor": [2.0] * 6,
    }
    sizes = {"vocab_size": 12, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    original = Phi3Config(
        **sizes, **heads, pad_token_id=0, original_max_position_embeddings=64, rope_parameters=dict(rope)
    )
    write_random_gguf(tmp_path / "a.gguf", "phi3", original)
    config = config_of(tmp_path / "a.gguf")
    assert config["rope_parameters"] == rope
    assert read_architecture(config).has_fused_projections  # type: ignore[attr-defined]
    write_random_gguf(tmp_path / "b.gguf", "phi3", original, omitted="ffn_up")
    with pytest.raises(ValueError, match=r"b\.gguf: the shape of blk\.0\.ffn_up\.weight is None"):
        config_of(tmp_path / "b.gguf")


def test_file_that_its_family_here_cannot_compute_is_converted(tmp_path: Path) -> None:
    plain, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert family_of(read_gguf(metadata_file(plain, {})))
    metadata_file(other, {}, {"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    assert family_of(read_gguf(other)) is None
    metadata_file(other, {"olmo2.attention.sliding_window": (512, UINT32)}, architecture="olmo2")  # OLMo 3
    assert family_of(read_gguf(other)) is None
    not_rotated: Entries = {"granite.rope.scaling.finetuned": (False, gguf_package.GGUFValueType.BOOL)}
    metadata_file(other, not_rotated, architecture="granite")
    assert family_of(read_gguf(other)) is None
    assert family_of(read_gguf(metadata_file(other, {}, architecture="granite")))
    metadata_file(other, {}, architecture="phi3")  # q, k and v in matrices of their own
    assert family_of(read_gguf(other)) is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 10**9, "the tensors have 1, it means 1000000000"),
        ("embedding_length", 65, "the tensors have 64, it means 65"),
        ("attention.head_count", 0, "it must be an integer of at least 1"),
        ("attention.head_count_kv", 4, "the tensors have 32, it means 64"),
        ("feed_forward_length", 97, "the tensors have 96, it means 97"),
        ("context_length", 2**31, "it must be at most 16777216 tokens"),
        ("rope.dimension_count", 8, "all 16 elements of a head must be rotated"),
    ],
)
def test_metadata_that_does_not_fit_the_tensors_is_refused(tmp_path: Path, key: str, value: int, message: str) -> None:
    path = metadata_file(tmp_path / "a.gguf", {f"llama.{key}": (value, UINT32)})
    with pytest.raises(ValueError, match=rf"a\.gguf: llama\.{key} is {value}: {message}; convert the model again"):
        config_of(path)


SIZES = {
    "vocab_size": 12,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
}
OF_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURES: dict[str, tuple[str, PreTrainedConfig]] = {
    "mixtral": (
        "llama",
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, architectures=["MixtralForCausalLM"]),
    ),
    "qwen2moe": (
        "qwen2moe",
        Qwen2MoeConfig(
            **SIZES, **OF_EXPERTS, shared_expert_intermediate_size=160, architectures=["Qwen2MoeForCausalLM"]
        ),
    ),
    "qwen3moe": (
        "qwen3moe",
        Qwen3MoeConfig(**SIZES, **OF_EXPERTS, head_dim=32, norm_topk_prob=True, architectures=["Qwen3MoeForCausalLM"]),
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_configuration_of_a_mixture_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    architecture, original = MIXTURES[name]
    path, bare = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_random_gguf(path, architecture, original)
    config = config_of(path)
    stored = {"dtype": "float32", "rms_norm_eps": config["rms_norm_eps"]}
    assert read_architecture(config) == read_architecture({**original.to_dict(), **stored})
    # Older files do not state the sizes of experts.
    sizes = {f"{architecture}.expert_{part}feed_forward_length" for part in ("", "shared_")}
    copied(path, bare, {}, architecture=architecture, left_out=sizes)
    assert read_architecture(config_of(bare)) == read_architecture(config)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("mixtral", "expert_count", 5, "the tensors have 4, it means 5"),
        ("mixtral", "feed_forward_length", 97, "the tensors have 96, it means 97"),
        ("qwen3moe", "expert_count", 0, "it must be an integer of at least 1"),
        ("qwen3moe", "expert_used_count", 5, "there are 4 experts"),
        ("qwen3moe", "expert_feed_forward_length", 33, "the tensors have 32, it means 33"),
        ("qwen2moe", "expert_shared_feed_forward_length", 33, "the tensors have 160, it means 33"),
    ],
)
def test_metadata_that_does_not_fit_the_experts_is_refused(
    tmp_path: Path, name: str, key: str, value: int, message: str
) -> None:
    architecture, original = MIXTURES[name]
    write_random_gguf(tmp_path / "plain.gguf", architecture, original)
    entries: Entries = {f"{architecture}.{key}": (value, UINT32)}
    path = copied(tmp_path / "plain.gguf", tmp_path / "a.gguf", entries, architecture=architecture)
    with pytest.raises(ValueError, match=rf"a\.gguf: {architecture}\.{key} is {value}: {message}; convert the model"):
        config_of(path)
