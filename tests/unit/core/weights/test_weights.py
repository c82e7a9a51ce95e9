"""Loading weights: matching checkpoints are read, others are refused by the names of their tensors."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_mp.core.models import build_model
from vllm_mp.core.models.loader import load_weights
from vllm_mp.model_config.architecture import Architecture
from vllm_mp.model_config.families.registry import read_architecture

HIDDEN, INNER, VOCAB = 16, 32, 50


def make_arch(tied: bool = True) -> Architecture:
    return read_architecture(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": tied,
        }
    )


def make_model(tied: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    return build_model(make_arch(tied), dtype, "cpu")


def make_checkpoint() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.input_layernorm": (HIDDEN,),
            f"layers.{layer}.post_attention_layernorm": (HIDDEN,),
            f"layers.{layer}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"layers.{layer}.self_attn.k_proj": (HIDDEN // 2, HIDDEN),
            f"layers.{layer}.self_attn.v_proj": (HIDDEN // 2, HIDDEN),
            f"layers.{layer}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"layers.{layer}.mlp.gate_proj": (INNER, HIDDEN),
            f"layers.{layer}.mlp.up_proj": (INNER, HIDDEN),
            f"layers.{layer}.mlp.down_proj": (HIDDEN, INNER),
        }
    return {f"model.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def save_sharded(folder: Path, tensors: dict[str, Tensor]) -> list[Path]:
    names = list(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [folder / file for file in halves]


def test_single_file_fills_fused_parameters_and_casts(tmp_path: Path) -> None:
    tensors = make_checkpoint()
    tables = ("inv_freq", "cos_cached", "sin_cached")  # which older releases of transformers saved
    tensors |= {f"model.layers.0.self_attn.rotary_emb.{table}": torch.ones(2) for table in tables}
    save_file(tensors, tmp_path / "model.safetensors")
    model = make_model(dtype=torch.bfloat16)
    fractions: list[float] = []
    load_weights(model, tmp_path, "auto", 0, fractions.append)
    loaded = dict(model.named_parameters())
    at = "model.layers.1.self_attn."
    qkv = torch.cat([tensors[f"{at}{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(loaded["decoder.layers.1.attention.qkv_proj.weight"], qkv.bfloat16())
    assert torch.equal(loaded["embed_tokens"], tensors["model.embed_tokens.weight"].bfloat16())
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_shards_load_the_same_as_a_single_file(tmp_path: Path) -> None:
    tensors = make_checkpoint()
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    save_sharded(tmp_path / "two", tensors)
    single, sharded = make_model(), make_model()
    load_weights(single, tmp_path / "one", "auto", 0)
    load_weights(sharded, tmp_path / "two", "safetensors", 0)
    for a, b in zip(single.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_names_without_the_model_prefix_load(tmp_path: Path) -> None:
    tensors = {name.removeprefix("model."): tensor for name, tensor in make_checkpoint().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = make_model()
    load_weights(model, tmp_path, "auto", 0)
    assert torch.equal(dict(model.named_parameters())["decoder.norm"], tensors["norm.weight"])


def test_tied_head_may_be_present_when_it_is_equal(tmp_path: Path) -> None:
    tensors = make_checkpoint()
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    load_weights(make_model(), tmp_path, "auto", 0)
    save_file({**tensors, "lm_head.weight": head + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from embed_tokens\.weight"):
        load_weights(make_model(), tmp_path, "auto", 0)


def test_untied_head_must_be_present(tmp_path: Path) -> None:
    save_file(make_checkpoint(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        load_weights(make_model(tied=False), tmp_path, "auto", 0)


def test_every_mismatch_is_named_in_one_error(tmp_path: Path) -> None:
    tensors = make_checkpoint()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(HIDDEN + 1)
    tensors["model.embed_tokens.weight"] = torch.ones(VOCAB, HIDDEN, dtype=torch.int8)
    tensors["model.layers.7.unknown"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        load_weights(make_model(), tmp_path, "auto", 0)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "missing layers.1.mlp.up_proj.weight" in message
    assert f"model.norm.weight has shape [{HIDDEN + 1}], not [{HIDDEN}]" in message
    assert "model.embed_tokens.weight has dtype torch.int8" in message
    assert "unexpected model.layers.7.unknown" in message


def test_bias_that_the_model_does_not_have_may_be_zero(tmp_path: Path) -> None:
    bias = {"model.layers.0.mlp.up_proj.bias": torch.zeros(INNER)}
    save_file({**make_checkpoint(), **bias}, tmp_path / "model.safetensors")
    load_weights(make_model(), tmp_path, "auto", 0)
    bias["model.layers.0.mlp.up_proj.bias"][1] = 1
    save_file({**make_checkpoint(), **bias}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.0\.mlp\.up_proj\.bias"):
        load_weights(make_model(), tmp_path, "auto", 0)


def test_list_of_mismatches_is_bounded(tmp_path: Path) -> None:
    unknowns = {f"unknown.{i}": torch.ones(1) for i in range(500)}
    save_file({**make_checkpoint(), **unknowns}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"and 492 more") as caught:
        load_weights(make_model(), tmp_path, "auto", 0)
    assert len(str(caught.value)) < 1000


def test_missing_shard_is_named(tmp_path: Path) -> None:
    shards = save_sharded(tmp_path, make_checkpoint())
    shards[1].unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of the 2 files.*b\.safetensors: copy"):
        load_weights(make_model(), tmp_path, "auto", 0)


def test_shard_that_lacks_a_tensor_of_the_index_is_named(tmp_path: Path) -> None:
    shards = save_sharded(tmp_path, make_checkpoint())
    save_file({"x": torch.ones(1)}, shards[0])
    with pytest.raises(ValueError, match=r"a\.safetensors lacks model\.embed_tokens\.weight"):
        load_weights(make_model(), tmp_path, "auto", 0)


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", "..", "sub/a.safetensors"])
def test_index_must_not_point_outside_its_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(ValueError, match=re.escape(repr(file))):
        load_weights(make_model(), tmp_path, "auto", 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not valid JSON .*; fetch the model again"),
        ("[]", "holds a list, not a dict; fetch the model again"),
        ("{}", r"is not an index of weights \(it has no weight_map\); download it again"),
        ('{"weight_map": {}}', r"is not an index of weights \(it has an empty weight_map\); download it again"),
        ('{"weight_map": 3}', r"is not an index of weights \(it has a weight_map of int\); download it again"),
    ],
)
def test_damaged_index_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json " + message):
        load_weights(make_model(), tmp_path, "auto", 0)


@pytest.mark.parametrize("kept", [0, 4, 200, -100])
def test_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(make_checkpoint(), path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or incomplete.*download"):
        load_weights(make_model(), tmp_path, "auto", 0)


def test_unreadable_file_is_named_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(make_checkpoint(), tmp_path / "model.safetensors")

    # CI may run as root, which can read every file, so the refusal is simulated.
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"cannot read .*model\.safetensors \(Permission denied\)"):
        load_weights(make_model(), tmp_path, "auto", 0)


def test_folder_without_weights_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \.safetensors file.*save_pretrained"):
        load_weights(make_model(), tmp_path, "auto", 0)
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(ValueError, match=r"neither pytorch_model\.bin nor.*Hugging Face"):
        load_weights(make_model(), tmp_path, "auto", 0)


def test_safetensors_with_other_names_are_read(tmp_path: Path) -> None:
    tensors = make_checkpoint()
    (tmp_path / "one").mkdir()
    save_file(tensors, tmp_path / "one" / "gptq_model-4bit-128g.safetensors")
    (tmp_path / "two").mkdir()
    save_sharded(tmp_path / "two", tensors)
    (tmp_path / "two" / "model.safetensors.index.json").unlink()
    for folder in ("one", "two"):
        model = make_model()
        load_weights(model, tmp_path / folder, "auto", 0)
        assert torch.equal(dict(model.named_parameters())["embed_tokens"], tensors["model.embed_tokens.weight"])


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    first, again, other = make_model(), make_model(), make_model()
    load_weights(first, tmp_path / "absent", "dummy", 1)
    load_weights(again, tmp_path / "absent", "dummy", 1)
    load_weights(other, tmp_path / "absent", "dummy", 2)
    values, same, different = (dict(m.named_parameters()) for m in (first, again, other))
    assert all(torch.equal(values[name], same[name]) for name in values)
    assert not torch.equal(values["embed_tokens"], different["embed_tokens"])
    assert torch.equal(values["decoder.norm"], torch.ones(HIDDEN))
    assert values["embed_tokens"].std().item() == pytest.approx(0.02, rel=0.2)
    layers = [values[f"decoder.layers.{i}.mlp.down_proj.weight"] for i in range(2)]
    assert not torch.equal(*layers)


def test_dummy_weights_fill_parameters_larger_than_their_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_mp.core.weights.dummy.DUMMY_PERIOD", 101)
    model = make_model()
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    load_weights(model, Path("absent"), "dummy", 1)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
