"""The choice of an attention backend, and the calls of FlashAttention, checked by stand-ins with its signatures."""

import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from support.covering import covering
from support.paged_batch import DECODES_RAGGED, MIXED, PREFILLS, PagedBatch
from torch import Tensor

from vllm_mp.kernels import attention_backends, flash, reference
from vllm_mp.kernels.attention_backends import Case, choose
from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.cpu.library import library
from vllm_mp.kernels.triton import available
from vllm_mp.machine.cpu_info import KERNELS_VARIABLE


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float | None,
    window: Sequence[int],
    soft_cap: float,
) -> Tensor:
    """Compute what FlashAttention's functions compute, by kernels/reference.py, and check their arguments."""
    for tensor in (query_start, seq_lens, block_table):
        assert tensor.dtype == torch.int32
        assert tensor.stride(-1) == 1
    assert len(query_start) == len(seq_lens) + 1 == len(block_table) + 1
    assert query_start[0] == 0
    assert query_start[-1] == len(q)
    assert scale is not None
    # No window is (-1, -1); a window of n keys is (n - 1, 0).
    assert tuple(window) == (-1, -1) or (window[0] >= 0 and window[1] == 0)
    metadata = AttentionMetadata(
        query_start=query_start,
        seq_lens=seq_lens,
        block_table=block_table,
        cell_mapping=torch.empty(0, dtype=torch.int64),
        query_lens=query_start.diff().tolist(),
        host_seq_lens=seq_lens.tolist(),
        num_decodes=0,
        max_seq_len=int(seq_lens.max()),
    )
    sliding = None if window[0] < 0 else window[0] + 1
    return reference.paged_attention(q, k_cache, v_cache, metadata, scale, sliding, soft_cap or None)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """FlashAttention-3's function, from hopper/flash_attn_interface.py."""
    assert causal
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    return _attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size, softcap)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """FlashAttention-2's function, from flash_attn/flash_attn_interface.py, version 2.6 or later."""
    assert causal
    assert dropout_p == 0
    assert cu_seqlens_k.dtype == torch.int32
    seq_lens = cu_seqlens_k.diff()
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), seq_lens.max())
    return _attend(q, k, v, cu_seqlens_q, seq_lens, block_table, softmax_scale, window_size, softcap)


def module(name: str, **functions: Any) -> ModuleType:
    """Return a module of that name, which can be found and imported like an installed one."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    for attribute, function in functions.items():
        setattr(made, attribute, function)
    return made


CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HEADS = [((2, 64), (2, 64))]
CASE = Case(CUDA, torch.bfloat16, "auto", 16, HEADS)
BLOCKS_OF_256 = CASE._replace(block_size=256)
THREE, TWO = (9, 0), (8, 6)
"""Compute capabilities on which FlashAttention 3 and 2 run."""


class Machine:
    """A machine with a GPU of compute capability 9.0 and without FlashAttention, until told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        for name in ("flash_attn_interface", "flash_attn"):
            monkeypatch.setitem(sys.modules, name, None)
        self.has(THREE)

    def has(self, capability: tuple[int, int]) -> None:
        self._monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    def install(self, name: str, **functions: Any) -> None:
        self._monkeypatch.setitem(sys.modules, name, module(name, **functions))

    def install_both(self) -> None:
        self.install("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)
        self.install("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    caches = (available.operations, library)
    for cache in caches:
        cache.cache_clear()
    yield Machine(monkeypatch)
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("version", "rows", "heads", "kv_heads", "window", "soft_cap"),
    covering(
        [(THREE,), (TWO,)],
        [DECODES_RAGGED, PREFILLS, MIXED],
        [(4, 4), (6, 2), (8, 1)],
        [(None, None), (7, None), (None, 3.0), (20, 3.0)],
    ),
    ids=str,
)
def test_flash_attention_agrees_with_the_reference(
    machine: Machine, version: Any, rows: Any, heads: int, kv_heads: int, window: int | None, soft_cap: float | None
) -> None:
    machine.install_both()
    machine.has(version)
    batch = PagedBatch(rows, heads, kv_heads, 16, 256 if version == TWO else 16)
    chosen = choose("flash_attn", CASE if version == THREE else BLOCKS_OF_256)
    assert chosen.name == "flash_attn"
    got = chosen.attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.2, window, soft_cap)
    torch.testing.assert_close(got, batch.expected(0.2, window, soft_cap), atol=2e-5, rtol=1e-4)


def test_flash_attention_gets_only_prefills_of_causal_steps_that_need_not_isolate(machine: Machine) -> None:
    batch = PagedBatch(MIXED, 4, 2, 16, 16)
    called: list[Any] = []

    def prefills(asked: flash.Prefills) -> Tensor:
        called.append(("flash", len(asked.q), asked.query_start.tolist(), asked.max_query_len, asked.max_seq_len))
        return torch.zeros_like(asked.q)

    def fallback(q: Tensor, *inputs: Any) -> Tensor:
        metadata = inputs[2]
        called.append(("fallback", len(q), metadata.query_lens, metadata.host_seq_lens, metadata.max_seq_len))
        return reference.paged_attention(q, *inputs)

    def attend(**changes: Any) -> Tensor:
        called.clear()
        metadata = batch.metadata._replace(**changes)
        return flash.paged_attention(prefills, fallback, batch.q, batch.k_cache, batch.v_cache, metadata, 0.2)

    decoded = attend()[:2]
    torch.testing.assert_close(decoded, batch.expected(0.2, None, None)[:2], atol=2e-5, rtol=1e-4)
    assert called == [("flash", 10, [0, 7, 10], 7, 50), ("fallback", 2, [1, 1], [40, 2], 40)]
    ends = torch.cat([torch.arange(last - count, last) + 1 for count, last in MIXED]).int()
    for changes in ({"isolates": True}, {"attention_ends": ends}):
        attend(**changes)
        assert called == [("fallback", 12, [1, 1, 7, 3], [40, 2, 7, 50], 50)]


def test_auto_chooses_the_first_backend_that_can_be_used(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("auto", CASE).name == "triton"
    machine.install_both()
    assert choose("auto", CASE).name == "flash_attn"
    assert choose("auto", CASE._replace(kv_shapes=[])).name == "torch"
    assert choose("auto", CASE._replace(dtype=torch.float32)).name == "triton"
    monkeypatch.setattr(attention_backends.triton, "operations", lambda _: None)
    assert choose("auto", CASE._replace(dtype=torch.float32)).name == "torch"


def test_cpu_uses_the_cpp_kernels_if_they_are_built_and_torch_otherwise(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASE._replace(device=CPU)
    expected = "cpu" if library() else "torch"
    assert choose("auto", case).name == expected
    assert choose("auto", case._replace(dtype=torch.float16)).name == "torch"
    assert choose("auto", case._replace(cache_dtype="fp8")).name == "torch"
    assert choose("auto", case._replace(cache_dtype="int8")).name == expected
    assert choose("auto", case._replace(kv_shapes=[*HEADS, ((2, 63), (2, 64))])).name == "torch"
    assert choose(expected, case).name == expected, "the name that auto chooses must be accepted as an option"
    library.cache_clear()
    monkeypatch.setenv(KERNELS_VARIABLE, "none")
    assert choose("auto", case).name == choose("torch", case).name == "torch"


@pytest.mark.parametrize(
    ("name", "case", "words"),
    [
        ("flash_attn", CASE._replace(device=CPU), "CUDA device, .*set device='cuda'"),
        ("flash_attn", CASE._replace(dtype=torch.float32), "float32; set dtype='bfloat16'"),
        ("flash_attn", CASE._replace(cache_dtype="fp8"), "kv_cache_dtype='fp8'; set that to 'auto'"),
        ("flash_attn", CASE._replace(kv_shapes=[]), "encoder"),
        ("flash_attn", CASE._replace(kv_shapes=[*HEADS, ((2, 192), (2, 128))]), "192 for keys and 128 for values"),
        ("flash_attn", CASE._replace(kv_shapes=[((2, 512), (2, 512))]), "up to 256, .*512 for keys"),
        ("flash_attn", CASE, r"FlashAttention-3 is not installed \(module flash_attn_interface\); Flash.*-2 is not"),
        ("triton", CASE._replace(device=CPU), "set device='cuda'"),
        ("triton", CASE._replace(kv_shapes=[]), "encoder"),
        ("triton", CASE._replace(cache_dtype="int8"), "kv_cache_dtype='int8'; set that to 'auto'"),
        ("cpu", CASE, "for CPUs"),
    ],
)
def test_unsupported_backend_is_refused_with_the_remedy(machine: Machine, name: str, case: Case, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^attention_backend='{name}': .*{words}.*; or leave it 'auto'$"):
        choose(name, case)


@pytest.mark.skipif(library() is None, reason="the C++ kernels are not built")
def test_torch_backend_is_refused_where_cpp_computes_whole_layers(machine: Machine) -> None:
    with pytest.raises(ValueError, match=f"^attention_backend='torch': .*set {KERNELS_VARIABLE}=none"):
        choose("torch", CASE._replace(device=CPU))


def _old_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any):
    raise AssertionError


@pytest.mark.parametrize(
    ("capability", "functions", "block_size", "words"),
    [
        ((7, 5), {"flash_attn_varlen_func": flash_attn_varlen_func}, 256, "needs compute capability 8.0, .* has 7.5"),
        (TWO, {"flash_attn_varlen_func": flash_attn_varlen_func}, 16, "multiple of 256 tokens; set block_size=256"),
        (TWO, {"flash_attn_varlen_func": _old_varlen}, 256, "too old: .* lacks block_table, softcap, window_size"),
        (TWO, {}, 256, "cannot be imported: .*no attribute 'flash_attn_varlen_func'.*build for torch"),
    ],
    ids=["capability", "blocks", "old", "broken"],
)
def test_unusable_flash_attention_is_refused_and_auto_skips_it_with_a_warning(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    functions: dict[str, Any],
    block_size: int,
    words: str,
) -> None:
    machine.install("flash_attn", **functions)
    machine.has(capability)
    case = CASE._replace(block_size=block_size)
    with pytest.raises(ValueError, match=rf"^attention_backend='flash_attn': .*{words}"):
        choose("flash_attn", case)
    with caplog.at_level(logging.WARNING):
        assert choose("auto", case).name == "triton"
    (warning,) = caplog.records
    assert "FlashAttention is installed but cannot be used" in warning.getMessage()


def test_backends_say_whether_they_isolate_and_can_be_captured(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install_both()
    expected = {"flash_attn": (True, False), "triton": (True, True), "torch": (False, False)}
    for name, (captures, isolates) in expected.items():
        chosen = choose(name, CASE)
        assert (chosen.captures, chosen.isolates) == (captures, isolates)
    long_heads = CASE._replace(kv_shapes=[*HEADS, ((2, 512), (2, 512))])
    assert not choose("triton", long_heads).isolates, "the reference computes heads that are too long"
    assert choose("torch", CASE._replace(kv_shapes=[])).isolates, "an encoder has no cache to isolate"
    monkeypatch.setattr(attention_backends.triton, "operations", lambda _: None)
    assert not choose("flash_attn", CASE).captures, "torch computes its decodes"
