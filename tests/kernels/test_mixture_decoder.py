"""The fused decoder of mixtures of experts, in every build of the C++ kernels, beside its modules."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from support.covering import by_turns
from support.key_groups import keys_in_groups
from support.paged_batch import MIXED, PREFILLS, PagedBatch
from torch import Tensor
from transformers import GraniteMoeConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from vllm_mp.core.lora.targets import projections
from vllm_mp.core.models import build_model
from vllm_mp.core.models.linear import pack_projections
from vllm_mp.core.weights.dummy import fill_with_dummy_weights
from vllm_mp.kernels import ops
from vllm_mp.kernels.cpu.decoder import FusedDecoder
from vllm_mp.model_config.families.registry import read_architecture

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
EXPERTS: dict[str, Any] = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
QWEN2 = Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=224)
CONFIGS = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, sliding_window=9),
    "qwen2-moe": QWEN2,
    "every-second-layer": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=32, decoder_sparse_step=2),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32),
    "qwen3-moe-normalized": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32, norm_topk_prob=True, mlp_only_layers=[1]),
    "granite-moe": GraniteMoeConfig(**SIZES, num_local_experts=40, num_experts_per_tok=4, residual_multiplier=0.7),
}
KINDS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float32, "int8"),
    "int8-bfloat16": (torch.bfloat16, "int8"),
    "blocks": (torch.float32, "blocks"),
    "blocks-bfloat16": (torch.bfloat16, "blocks"),
}
"""The dtype of rows, and the quantization of weights."""


def architecture(config: Any, kind: str) -> Any:
    """Return a native architecture; if rows are rounded, a token chooses all experts, or rounding could change them."""
    name = type(config).__name__.replace("Config", "ForCausalLM")
    fields = {**config.to_dict(), "architectures": [name]}
    if kind != "float32":
        fields["num_experts_per_tok"] = fields.get("num_experts") or fields["num_local_experts"]
    arch = read_architecture(fields)
    return msgspec.structs.replace(arch, blocks="int4") if KINDS[kind][1] == "blocks" else arch


def random_model(arch: Any, kind: str) -> Any:
    model = build_model(arch, KINDS[kind][0], "cpu")
    fill_with_dummy_weights(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            else:
                parameter.add_(torch.randn_like(parameter) / 10)
    return model


def packed(model: Any, kind: str) -> Any:
    dtype, quantization = KINDS[kind]
    fused = copy.deepcopy(model)
    fused.pack("int8" if quantization == "int8" else None, dtype)
    assert isinstance(fused.decoder, FusedDecoder)
    return fused


class Step:
    """Embeddings of random tokens in rows of (query tokens, context), and the caches that a step reads."""

    def __init__(self, arch: Any, rows: Sequence[tuple[int, int]], kind: str) -> None:
        dtype = KINDS[kind][0]
        self.batch = PagedBatch(list(rows), arch.num_heads, arch.num_kv_heads, arch.head_dim, 16)
        self.positions = torch.cat([torch.arange(context - count, context) for count, context in rows])
        self.x = torch.randn(len(self.positions), arch.hidden_size).to(dtype)
        shape = self.batch.k_cache.shape
        self.caches = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(arch.num_layers)]

    def hidden(self, model: Any, slots: Tensor | None = None) -> Tensor:
        """Return the hidden states that `model` computes; `ops.library` must be the one that it was packed with."""
        kernels = ops.library() if isinstance(model.decoder, FusedDecoder) else None
        caches = [
            (keys.clone() if kernels is None else keys_in_groups(keys, kernels), values.clone())
            for keys, values in self.caches
        ]
        metadata = self.batch.metadata._replace(adapter_slots=slots)
        with torch.inference_mode():
            hidden: Tensor = model(self.positions, self.positions, caches, metadata, self.x.clone())
        return hidden


def load_adapters(arch: Any, dtype: torch.dtype, models: Sequence[Any]) -> None:
    """Load the same random adapters of two ranks into slots 0 and 2 of each model."""
    stacks = [model.make_adapter_stacks(3, 10) for model in models]
    for projection, *of_models in zip(projections(arch), *stacks, strict=True):
        for slot, rank in ((0, 10), (2, 3)):
            a = (torch.randn(rank, projection.inputs) / 8).to(dtype)
            parts = [ops.Factors(a, (torch.randn(size, rank) / 8).to(dtype)) for size in projection.outputs]
            for stack in of_models:
                stack.load(slot, parts)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "float32") for name in CONFIGS), *by_turns([*CONFIGS], [kind for kind in KINDS if kind != "float32"])],
)
def test_fused_mixture_agrees_with_its_modules(build, kind, name, monkeypatch):
    dtype, quantization = KINDS[kind]
    arch = architecture(CONFIGS[name], kind)
    modules = random_model(arch, kind)
    fused = packed(modules, kind)
    if quantization is not None:
        pack_projections(modules, quantization if quantization == "int8" else None)
    load_adapters(arch, dtype, [modules, fused])
    bound = 1e-5 if kind == "float32" else 0.02
    for rows in (MIXED, PREFILLS, [(1, 30)], [(1, 30), (1, 7)]):
        step = Step(arch, rows, kind)
        for slots in (None, torch.randint(-1, 3, (len(step.x),), dtype=torch.int32)):
            got = step.hidden(fused, slots)
            with monkeypatch.context() as patch:
                patch.setattr(ops, "library", lambda: None)
                expected = step.hidden(modules, slots)
            assert (got.float() - expected.float()).norm() <= bound * expected.float().norm()


@pytest.mark.parametrize(("kind", "name"), by_turns([*KINDS], ["qwen2-moe", "qwen3-moe-normalized"]))
def test_fused_mixture_is_batch_invariant(build, kind, name):
    arch = architecture(CONFIGS[name], "float32")
    if KINDS[kind][1] == "blocks":
        arch = msgspec.structs.replace(arch, blocks="int4")
    model = packed(random_model(arch, kind), kind)
    rows = [(1, 1)] * 20 + [(30, 30), (2, 2)]
    step = Step(arch, rows, kind)
    together = step.hidden(model)
    counts = [count for count, _ in rows]
    for first, last in ((0, 1), (1, 3), (3, 20), (20, 21), (21, 22)):
        part = Step(arch, rows[first:last], kind)
        part.x = step.x[sum(counts[:first]) : sum(counts[:last])]
        assert torch.equal(part.hidden(model), together[sum(counts[:first]) : sum(counts[:last])])
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 3)
    try:
        assert torch.equal(step.hidden(model), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["float32", "int8", "blocks"])
def test_step_with_more_choices_than_are_computed_together_gives_the_same_rows(build, kind):
    sizes = {**SIZES, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    experts = {**EXPERTS, "num_experts_per_tok": EXPERTS["num_experts"], "moe_intermediate_size": 32}
    config = Qwen2MoeConfig(**sizes, **experts, shared_expert_intermediate_size=32)
    arch = architecture(config, kind)
    model = packed(random_model(arch, kind), kind)
    step = Step(arch, [(700, 700)] * 2, kind)
    together = step.hidden(model)
    alone = Step(arch, [(700, 700)], kind)
    for part, expected in zip(step.x.split(700), together.split(700), strict=True):
        alone.x = part
        assert torch.equal(alone.hidden(model), expected)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_of_experts_with_the_same_score_the_first_are_chosen(build, kind, num_tokens):
    arch = architecture(QWEN2, "float32")
    model = random_model(arch, kind)
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.mlp.router.weight.zero_()
    step = Step(arch, [(1, 9)] * num_tokens, kind)
    expected = step.hidden(packed(model, kind))
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.mlp.gate_up[EXPERTS["num_experts_per_tok"] :] = math.nan
    assert expected.isfinite().all()
    assert torch.equal(step.hidden(packed(model, kind)), expected)


@pytest.mark.parametrize("kind", ["float32", "int8", "blocks"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_token_that_is_not_finite_affects_no_other_token_of_a_mixture(build, kind, value):
    arch = architecture(QWEN2, kind)
    model = packed(random_model(arch, kind), kind)
    step = Step(arch, [(1, 1)] * 6, kind)
    expected = step.hidden(model)
    step.x[2, 5] = value
    got = step.hidden(model)
    assert not got[2].isfinite().all()
    others = [token for token in range(6) if token != 2]
    assert torch.equal(got[others], expected[others])
