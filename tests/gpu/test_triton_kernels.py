"""The Triton kernels on the GPU: the tests of the interpreter, and tests that need a GPU's memory."""

import pytest
import torch
from support.gpu_device import ON_DEVICE

from vllm_mp.testing.attention_steps import paged_metadata

pytest.importorskip("triton")
pytestmark = [*ON_DEVICE]

from support.product_sweep import *  # noqa: E402, F403
from support.step_sweep import *  # noqa: E402, F403
from support.triton_sweep import *  # noqa: E402, F403
from support.triton_sweep import DEVICE, assert_near, launch, operations, reference  # noqa: E402


@pytest.mark.skipif(DEVICE != "cuda", reason="takes 9 GB, and too long on a CPU")
def test_cache_with_more_elements_than_32_bits_count():
    block_size, kv_heads, dim = 16, 8, 128
    num_blocks = 2**31 // (block_size * kv_heads * dim) + 64
    caches = torch.empty(2, num_blocks, block_size, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE).unbind()
    rows = [(1, 70), (20, 50)]
    tables = [[num_blocks - 1 - i for i in range(5)], [num_blocks - 9 - i for i in range(4)]]
    metadata = paged_metadata(rows, tables, block_size, DEVICE)
    cells = torch.tensor([t[p // 16] * 16 + p % 16 for (_, n), t in zip(rows, tables, strict=True) for p in range(n)])
    k, v = torch.randn(2, len(cells), kv_heads, dim).bfloat16().to(DEVICE).unbind()
    operations.write_kv(k, v, *caches, cells.to(DEVICE))
    q = torch.randn(21, 32, dim).bfloat16().to(DEVICE)
    expected = reference.paged_attention(q, *caches, metadata, dim**-0.5)
    assert_near(operations.paged_attention(q, *caches, metadata, dim**-0.5), expected.cpu(), torch.bfloat16)
    table = torch.ones(64, dim, dtype=torch.bfloat16, device=DEVICE)
    before = caches[0].flatten(0, 1)[cells[-5:].to(DEVICE)]
    operations.rotary_write_kv(q[:5], k[:5], v[:5], cells.to(DEVICE)[:5] * 0, table, *caches, cells.to(DEVICE)[-5:])
    assert torch.equal(caches[1].flatten(0, 1)[cells[-5:].to(DEVICE)], v[:5])
    assert not torch.equal(caches[0].flatten(0, 1)[cells[-5:].to(DEVICE)], before)


@pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA has graphs")
@pytest.mark.parametrize("splits", [1, 8])
def test_captured_decode_step_can_be_replayed_for_other_rows(splits):
    heads, kv_heads, dim, block_size, size = 8, 2, 128, 16, 4
    caches = torch.randn(2, 64, block_size, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE).unbind()
    q = torch.randn(size, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    table = torch.randperm(64, dtype=torch.int32, device=DEVICE).view(size, 16)
    metadata = paged_metadata([(1, 1)] * size, table.tolist(), block_size, DEVICE)
    metadata = metadata._replace(max_seq_len=256, decode_splits=splits)

    def attend():
        return operations.paged_attention(q, *caches, metadata, dim**-0.5)

    attend()  # compiles, which a capture does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for lens in ([200, 3, 0, 77], [256, 0, 0, 1]):
        metadata.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        for row, context in enumerate(lens):
            alone = paged_metadata([(1, max(context, 1))], [table[row].tolist()], block_size, DEVICE)
            expected = reference.paged_attention(q[row : row + 1], *caches, alone, dim**-0.5)
            assert_near(out[row : row + 1], expected.cpu() * (context > 0), torch.bfloat16)


@pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA has graphs")
@pytest.mark.parametrize("rows", [1, 16])
def test_products_that_start_early_read_what_the_kernel_before_wrote(rows, monkeypatch):
    """A chain of norms, activations and products in one graph equals the chain without early starts to the bit."""
    inner, device = 4096, torch.empty(0, device=DEVICE).device
    weights = [torch.randn(2 * inner, inner, device=DEVICE).bfloat16() for _ in range(4)]
    x, ones = torch.randn(rows, inner, device=DEVICE).bfloat16(), torch.ones(inner, device=DEVICE).bfloat16()

    def chain():
        state = x
        for weight in weights * 8:
            normed = operations.rms_norm(state, ones, 1e-5)
            state = operations.silu_and_mul(operations.linear(normed, weight))
        return state

    def captured():
        chain()  # compiles, which a capture does not allow
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        return graph, out

    early = captured()
    monkeypatch.setitem(launch.table(device), "dependent_launch", {"PREFETCH": 0})
    late = captured()
    for _ in range(50):
        x.copy_(torch.randn(rows, inner))
        for graph, _ in (early, late):
            graph.replay()
        assert torch.equal(early[1], late[1])


@pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA has graphs")
@pytest.mark.parametrize("parts", [1, 4])
def test_captured_product_of_few_rows_can_be_replayed(parts, monkeypatch):
    outputs, inputs = 512, 4096
    device = torch.empty(0, device=DEVICE).device
    options = {**launch.linear_options(outputs, inputs, "16", device), "PARTS": parts}
    monkeypatch.setitem(launch.table(device), launch.linear_key(outputs, inputs, "16"), options)
    x, weight = (torch.randn(size, device=DEVICE).bfloat16() for size in ((4, inputs), (outputs, inputs)))
    operations.linear(x, weight)  # compiles, which a capture does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = operations.linear(x, weight)
    for _ in range(2):
        x.copy_(torch.randn(4, inputs))
        graph.replay()
        assert_near(out, reference.linear(x.float(), weight.float()).cpu(), torch.bfloat16)
