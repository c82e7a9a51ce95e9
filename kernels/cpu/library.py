"""Loads the build of the C++ kernels that suits this processor, and declares its C interface (csrc/kernels.cpp)."""

import ctypes
import functools
import importlib.util
import logging
import os
import zlib
from ctypes import POINTER, c_float, c_int, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any, Final

import torch

from vllm_mp.kernels.sampling import TokenMasks
from vllm_mp.machine.cpu_info import KERNEL_BUILDS, KERNELS_VARIABLE, obstacle, refusal, runnable_builds

logger = logging.getLogger(__name__)

TRITON: Final = "triton"
DTYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

GATE_ACTIVATIONS: Final = {"silu": 0, "swish": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1}
"""The activations of the gate that the kernels compute, and their number there."""

DRAW_COLUMNS: Final = ("temperature", "typical_p", "min_p", "top_k", "top_p", "uniform")
"""The fields of `kernels.sampling.DrawParams` that `CDraws` points to."""


class CLinear(ctypes.Structure):
    """Mirrors `Linear` of csrc/linear.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
    )


class CBlockPart(ctypes.Structure):
    """Mirrors `BlockPart` of csrc/blocks.h."""

    _fields_ = (
        ("data", c_void_p),
        ("outputs", c_int64),
        ("type", c_int64),
        ("row_bytes", c_int64),
    )


class CBlockStrip(ctypes.Structure):
    """Mirrors `BlockStrip` of csrc/blocks.h."""

    _fields_ = (("at", c_void_p), ("type", c_int64))


class CBlockLinear(ctypes.Structure):
    """Mirrors `BlockMatrix` of csrc/blocks.h."""

    _fields_ = (
        ("parts", POINTER(CBlockPart)),
        ("num_parts", c_int64),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("is_pair", c_int64),
        ("strips", POINTER(CBlockStrip)),
        ("is_batch_invariant", c_int64),
    )


class CAttentionMetadata(ctypes.Structure):
    """Mirrors `AttentionMetadata` of csrc/attention.h."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("block_size", c_int64),
        ("cell_mapping", c_void_p),
        ("isolates", c_int64),
        ("attention_ends", c_void_p),
        ("has_int8_caches", c_int64),
    )


class CHeads(ctypes.Structure):
    """Mirrors `Heads` of csrc/attention.h."""

    _fields_ = (
        ("queries", c_int64),
        ("keys", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class CDecoderLayer(ctypes.Structure):
    """Mirrors `DecoderLayer<Linear>` of csrc/decoder.h."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("attention_output_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_output_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", CLinear),
        ("o", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("heads", CHeads),
        ("inner", c_int64),
        ("table", c_int64),
        ("experts", c_void_p),
        ("router", c_void_p),
    )


class CBlockDecoderLayer(ctypes.Structure):
    """Mirrors `DecoderLayer<BlockLinear>` of csrc/decoder.h."""

    _fields_ = tuple((name, CBlockLinear if kind is CLinear else kind) for name, kind in CDecoderLayer._fields_)


class CDecoder(ctypes.Structure):
    """Mirrors `Decoder` of csrc/decoder.h."""

    _fields_ = (
        ("layers", c_void_p),
        ("num_layers", c_int64),
        ("norm", c_void_p),
        ("eps", c_float),
        ("residual_multiplier", c_float),
        ("rounds_norms", c_int64),
        ("norms_all_heads", c_int64),
        ("is_gelu", c_int64),
        ("rotates_pairs", c_int64),
    )


class CExperts(ctypes.Structure):
    """Mirrors `Experts` of csrc/experts.h."""

    _fields_ = (("gate_up", c_void_p), ("down", c_void_p), ("num_experts", c_int64), ("is_gelu", c_int64))


class CRouter(ctypes.Structure):
    """Mirrors `Router` of csrc/router.h."""

    _fields_ = (
        ("scores", CLinear),
        ("num_chosen", c_int64),
        ("normalizes_weights", c_int64),
        ("rounds_weights", c_int64),
    )


class CRotaryTables(ctypes.Structure):
    """Mirrors `RotaryTables` of csrc/decoder.h."""

    _fields_ = (
        ("first", c_void_p),
        ("stride", c_int64),
        ("dim", c_int64),
    )


class CAdapterStack(ctypes.Structure):
    """Mirrors `AdapterStack` of csrc/lora.h."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("ranks", c_void_p),
        ("first_parts", c_void_p),
        ("num_slots", c_int64),
        ("max_rank", c_int64),
        ("parts", c_int64),
        ("span", c_int64),
        ("inputs", c_int64),
    )


class CLayerAdapters(ctypes.Structure):
    """Mirrors `LayerAdapters` of csrc/decoder.h."""

    _fields_ = tuple((name, POINTER(CAdapterStack)) for name in ("qkv", "o", "gate_up", "down"))


class CTokenMasks(ctypes.Structure):
    """Mirrors `TokenMasks` of csrc/token_masks.h."""

    _fields_ = (("words", c_void_p), ("num_words", c_int64), ("rows", c_void_p), ("count", c_int64))

    @classmethod
    def pointer(cls, masks: TokenMasks | None) -> Any:
        """Return a pointer to `masks`, which must outlive it; None without masks."""
        if masks is None:
            return None
        words, rows = masks
        return ctypes.pointer(cls(words.data_ptr(), words.shape[1], rows.data_ptr(), len(rows)))


class CDraws(ctypes.Structure):
    """Mirrors `Draws` of csrc/sampling.h."""

    _fields_ = tuple((name, c_void_p) for name in DRAW_COLUMNS)


class CLogprobs(ctypes.Structure):
    """Mirrors `Logprobs` of csrc/sampling.h."""

    _fields_ = (("most", c_int64), ("ids", c_void_p), ("values", c_void_p), ("ranks", c_void_p))


_DECODER: Final = (
    POINTER(CDecoder),
    c_int64,
    c_int64,
    POINTER(CAttentionMetadata),
    c_void_p,
    c_void_p,
    c_void_p,
    POINTER(c_void_p),
    POINTER(c_void_p),
    c_void_p,
    c_int,
    POINTER(CLayerAdapters),
    c_void_p,
)

_EXPERTS: Final = (POINTER(CExperts), c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int)

_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "pack": (c_void_p, c_int64, c_int64, c_int, c_void_p, c_void_p, c_void_p, c_int),
    "linear": (POINTER(CLinear), c_void_p, c_int64, c_void_p, c_int, POINTER(CAdapterStack), c_void_p),
    "logits": (POINTER(CLinear), c_void_p, c_int64, c_void_p, c_int),
    "argmax": (POINTER(CLinear), c_void_p, c_int64, c_void_p, POINTER(CTokenMasks), c_int),
    "block_linear": (POINTER(CBlockLinear), c_void_p, c_int64, c_void_p, c_int, POINTER(CAdapterStack), c_void_p),
    "block_logits": (POINTER(CBlockLinear), c_void_p, c_int64, c_void_p, c_int),
    "block_argmax": (POINTER(CBlockLinear), c_void_p, c_int64, c_void_p, POINTER(CTokenMasks), c_int),
    "block_embedding": (POINTER(CBlockPart), c_int64, c_void_p, c_int64, c_void_p, c_int),
    "argmax_rows": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int),
    "sample": (c_void_p, c_int64, c_int64, c_int64, POINTER(CDraws), c_void_p, c_int),
    "logprobs": (c_void_p, c_int64, c_int64, c_int64, c_void_p, POINTER(CLogprobs), c_int),
    "apply_token_masks": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int),
    "attention": (
        POINTER(CAttentionMetadata),
        POINTER(CHeads),
        c_void_p,
        c_int64,
        c_void_p,
        c_void_p,
        c_void_p,
        c_int,
    ),
    "decoder": _DECODER,
    "block_decoder": _DECODER,
    "experts": _EXPERTS,
    "block_experts": _EXPERTS,
}

_STRIP_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "strip_bytes": (POINTER(CBlockLinear),),
    "write_strips": (POINTER(CBlockLinear), c_void_p, POINTER(CBlockStrip), c_int),
}


def _interface() -> int:
    """Return a number that changes with what is declared above; `INTERFACE` of csrc/kernels.cpp must be the same."""
    structures = (
        CLinear,
        CBlockPart,
        CBlockStrip,
        CBlockLinear,
        CAttentionMetadata,
        CHeads,
        CDecoderLayer,
        CBlockDecoderLayer,
        CDecoder,
        CExperts,
        CRouter,
        CRotaryTables,
        CAdapterStack,
        CLayerAdapters,
        CTokenMasks,
        CDraws,
        CLogprobs,
    )
    fields = [[(field[0], field[1].__name__) for field in structure._fields_] for structure in structures]
    arguments = [(name, [kind.__name__ for kind in kinds]) for name, kinds in (_SIGNATURES | _STRIP_SIGNATURES).items()]
    return zlib.crc32(repr((fields, arguments)).encode())


class Library:
    """One build of the kernels."""

    def __init__(self, path: Path) -> None:
        """Raise ValueError if the build has another interface than this module declares."""
        self.path = path
        self.name = path.name.partition(".")[0].removeprefix("_")
        self._functions = ctypes.CDLL(str(path))
        built = getattr(self._functions, "vmp_interface", None)
        if built is not None:
            built.restype = c_uint32
        if built is None or built() != _interface():
            raise ValueError(f"{path} was compiled for another version of the package (not {_interface():#010x})")
        self._functions.vmp_panel_columns.restype = c_int64
        self.panel_columns: int = self._functions.vmp_panel_columns()
        """The columns of a panel of packed weights; a panel of a pair of matrices has half as many columns of each."""
        self.is_batch_invariant = True
        """Whether products that are made from now on give a row the same result in any number of rows."""
        self.strip_bytes = self._functions.vmp_strip_bytes
        self.strip_bytes.argtypes, self.strip_bytes.restype = _STRIP_SIGNATURES["strip_bytes"], c_int64
        self.write_strips = self._functions.vmp_write_strips
        self.write_strips.argtypes, self.write_strips.restype = _STRIP_SIGNATURES["write_strips"], None

    @functools.cache  # noqa: B019, because a process has one library
    def function(self, name: str, dtype: torch.dtype) -> Any:
        """Return the C function `vmp_{name}` for tensors of `dtype`, a key of `DTYPES`."""
        found = self._functions[f"vmp_{name}_{DTYPES[dtype]}"]
        found.argtypes = _SIGNATURES[name]
        found.restype = None
        return found


@functools.cache
def library() -> Library | None:
    """Return the fastest build that this processor runs, or the build that `KERNELS_VARIABLE` names; None for torch.

    Raises ValueError if `KERNELS_VARIABLE` names a build that is unknown, cannot run here, or was not built.
    """
    chosen = os.environ.get(KERNELS_VARIABLE)
    if chosen == "none":
        return None
    if chosen == TRITON:
        check_interpreter()
        return None
    if chosen is None:
        for reason in filter(None, map(refusal, KERNEL_BUILDS)):
            logger.warning("the fastest build of the C++ kernels cannot run: %s", reason)
        found = next((build for name in runnable_builds() if (build := load(name)) is not None), None)
        if found is None:
            logger.warning("the C++ kernels are not built, so torch computes, several times slower; %s", _REMEDY)
        return found
    if chosen not in KERNEL_BUILDS:
        raise ValueError(f"{KERNELS_VARIABLE}={chosen!r}: give one of {', '.join(KERNEL_BUILDS)}, none, {TRITON}")
    if chosen not in runnable_builds():
        builds = ", ".join(runnable_builds())
        raise ValueError(f"{KERNELS_VARIABLE}={chosen!r}: {obstacle(chosen)}; give one of {builds}")
    if (build := load(chosen)) is None:
        raise ValueError(
            f"{KERNELS_VARIABLE}={chosen!r}: that build is not compiled; {_REMEDY}, with VLLM_MP_BUILDS=all"
        )
    return build


def check_interpreter() -> None:
    """Raise ValueError if Triton's kernels cannot run on CPU tensors."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"{KERNELS_VARIABLE}={TRITON}: triton is not installed; run `pip install triton`")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{KERNELS_VARIABLE}={TRITON}: Triton runs on a CPU in its interpreter only; set TRITON_INTERPRET=1 too"
        )


def load(name: str) -> Library | None:
    """Return the build of that name; None if it was not built, or for another version of the package."""
    spec = importlib.util.find_spec(f"{__package__}._{name}")
    if spec is None or spec.origin is None:
        return None
    try:
        return Library(Path(spec.origin))
    except ValueError as error:
        logger.warning("%s; %s", error, _REMEDY)
        return None


def address(tensor: torch.Tensor | None) -> int | None:
    """Return the address of the elements of `tensor`; None for no tensor."""
    return None if tensor is None else tensor.data_ptr()


_REMEDY: Final = "install a C++ compiler, and then this package again"
