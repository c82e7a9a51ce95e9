"""A program that converts a GGUF file to a model folder with safetensors.

Run as `python -m vllm_mp.core.weights.gguf_to_safetensors SOURCE.gguf FOLDER`; `vllm_mp.model_store.gguf` runs it once
for each file, and caches the folder. Files of the families that can be mapped are read as a mapping reads them;
transformers reads all others, with accelerate. Tensors in F32, F16 and BF16 keep their exact values. Quantized tensors
are kept in 16 bits: in float16, whose 11 significant bits hold them more exactly than the 8 of bfloat16, or in bfloat16
if their magnitudes are outside float16's range. config.json names float32, as the engine may compute in any dtype.

The first line on stdout is `plan BYTES SECONDS`, the space and about the time that the conversion takes. Lines
`progress FRACTION` tell the progress. Exit status 1 means that the file cannot be converted, `DISK_FULL_EXIT` that the
disk is too small; the last line of stderr is the reason.
"""

import contextlib
import errno
import functools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from vllm_mp.core.weights.gguf_tokenizer import end_token_ids, read_tokenizer, token_id
from vllm_mp.model_store.gguf import CONVERTED_FILE, DISK_FULL_EXIT, NO_TOKENIZER_FILE, TOKENIZER_ONLY
from vllm_mp.model_store.gguf_file.config import family_of
from vllm_mp.model_store.gguf_file.parts import part_paths, read_gguf_model

_EXACT_KINDS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
"""Types of tensors that are not quantized."""
# Processor time of a tiny file, and of the default model beyond that; a busy machine takes longer.
_START_SECONDS = 7.5
_WEIGHTS_PER_SECOND = 11e6

# The end of each phase, as a fraction of the time that the conversion of the default model takes.
_OPENED_AT = 0.1
_LOADED_AT = 0.6
_DEQUANTIZED_AT = 0.85

# Metadata that some versions of transformers ignore, and the configuration's name for it.
_IGNORED_METADATA = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "context_length": "max_position_embeddings",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
}

_ABSENT = object()
_ROTARY = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""The names of tensors with rotary frequencies or their factors."""


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """The GGUF reader over a plain array, because slicing its memmap takes three quarters of its time."""

    @property
    def data(self) -> Any:
        return self._plain

    @data.setter
    def data(self, mapped: Any) -> None:
        self._plain = mapped.view(np.ndarray)


def main(arguments: list[str]) -> int:
    """Convert `arguments` = [source, folder], or the tokenizer alone with `TOKENIZER_ONLY`; return the exit status."""
    source, folder = map(Path, arguments[:2])
    try:
        (convert_tokenizer if TOKENIZER_ONLY in arguments[2:] else convert)(source, folder)
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        reason = getattr(error, "strerror", None) or text.splitlines()[0]
        print(reason, file=sys.stderr)
        full = getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC}" in text
        return DISK_FULL_EXIT if full else 1
    return 0


def convert(source: Path, folder: Path) -> None:
    """Write the model in `source` to `folder` as config, generation config, tokenizer and safetensors.

    A tokenizer that cannot be used is left out, as `convert_tokenizer` does. Raises ValueError for a file that cannot
    be read, an architecture that transformers does not know from GGUF, and weights that do not belong to the
    architecture; OSError (ENOSPC), before any work, if the disk has no room for the result.
    """
    reader = _open(source)
    _announce(reader, folder)
    _reuse_reader(reader)
    _report(_OPENED_AT)

    folder.mkdir()
    _write_tokenizer(source, reader, folder)
    _report(_LOADED_AT)
    file = read_gguf_model(source)
    if family := family_of(file):
        # Imported here, because a bad file is found before the import of torch would end.
        from vllm_mp.core.weights.known_gguf import write_model

        _write_special_tokens(reader, folder)
        write_model(file, family, folder, _report_part)
    else:
        _write_model_of_transformers(source, reader, folder)
    (folder / CONVERTED_FILE).write_text(f"{source.name}\n")
    for path in folder.iterdir():
        # safetensors gives access to the owner only, but several users may share the cache.
        path.chmod(0o644)
    _report(1.0)


def _write_model_of_transformers(source: Path, reader: gguf.GGUFReader, folder: Path) -> None:
    """Write the configuration and the weights that transformers makes of the file."""
    from vllm_mp.core.weights.known_gguf import in_16_bits_if_exact

    architecture = str(reader.fields["general.architecture"].contents())
    try:
        model = _load(source, reader, architecture)
    except OSError:
        raise
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"architecture {architecture!r}: {text}") from error
    _report(_DEQUANTIZED_AT)
    use_special_tokens_of_file(model, reader)
    for parameter in model.parameters():
        parameter.data = in_16_bits_if_exact(parameter.data)
    model.save_pretrained(folder)
    model.config.dtype = "float32"
    model.config.save_pretrained(folder)


def convert_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer of `source` to `folder`, and the special tokens of the file as generation_config.json.

    A file that has no tokenizer, or one that cannot be used, can run with another tokenizer: the reason is written to
    `NO_TOKENIZER_FILE`. Raises ValueError for a file that cannot be read.
    """
    reader = _open(source)
    _reuse_reader(reader)
    folder.mkdir()
    _write_tokenizer(source, reader, folder)
    _write_special_tokens(reader, folder)


def _write_tokenizer(source: Path, reader: gguf.GGUFReader, folder: Path) -> None:
    """Write the tokenizer of `source` to `folder`, or why it cannot be used."""
    try:
        read_tokenizer(source, reader).save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        (folder / NO_TOKENIZER_FILE).write_text(f"that of {source.name} cannot be used: {text}")


def _write_special_tokens(reader: gguf.GGUFReader, folder: Path) -> None:
    """Write the special tokens of the file as generation_config.json."""
    ends: Any = end_token_ids(reader)
    special = {
        "bos_token_id": token_id(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
    }
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2))


def _load(source: Path, reader: gguf.GGUFReader, architecture: str) -> Any:
    """Return the dequantized model that transformers makes from the file."""
    # Imported here, because a bad file is found long before the import of transformers would end.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    file = {"gguf_file": source.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(source.parent, **file)
    _complete(config, reader, architecture)
    with _unused_tensors() as unused:
        model, report = AutoModelForCausalLM.from_pretrained(
            source.parent,
            config=config,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **file,
        )
    # transformers draws weights at random that it does not find, and drops tensors that it does not know.
    problems = [f"no tensor for {name}" for name in sorted(report["missing_keys"])]
    problems += [
        f"{name} has shape {list(found)}, not {list(wanted)}" for name, found, wanted in report["mismatched_keys"]
    ]
    unused += [name for name in sorted(report["unexpected_keys"]) if not _ROTARY.fullmatch(name)]
    problems += [f"{name} is a tensor that {type(model).__name__} does not have" for name in unused]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"{problems[0]}{more}: transformers does not fully know this architecture from GGUF")
    return model


@contextlib.contextmanager
def _unused_tensors() -> Iterator[list[str]]:
    """Collect the names of the tensors that transformers reads in this block and has no parameter for.

    Rotary frequencies, which the configuration has, and biases of zeros are left out, as in files that are mapped.
    """
    from transformers import modeling_gguf_pytorch_utils as library

    unused: list[str] = []
    names_of = library.get_gguf_hf_weights_map

    def watched_names(model: Any, processor: Any, *of_part: Any, **options: Any) -> dict[str, str]:
        names: dict[str, str] = names_of(model, processor, *of_part, **options)
        if of_part or options:
            return names  # the names in a part of the model, for which the function calls itself
        process = processor.process

        def watched_process(weights: Any, name: str, **given: Any) -> Any:
            result = process(weights=weights, name=name, **given)
            # A processor returns no name for a tensor that it has stored itself.
            is_used = result.name is None or result.name in names
            is_zero_bias = name.endswith(".bias") and not weights.any()
            if not is_used and not is_zero_bias and not _ROTARY.fullmatch(name):
                unused.append(name)
            return result

        processor.process = watched_process
        return names

    library.get_gguf_hf_weights_map = watched_names
    try:
        yield unused
    finally:
        library.get_gguf_hf_weights_map = names_of


def _complete(config: Any, reader: gguf.GGUFReader, architecture: str) -> None:
    """Set the fields of `config` that the file states and transformers ignores."""
    for key, name in _IGNORED_METADATA.items():
        field = reader.fields.get(f"{architecture}.{key}")
        if field is not None and getattr(config, name, _ABSENT) not in (_ABSENT, field.contents()):
            setattr(config, name, field.contents())
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # layers with a window are not scaled
    theta = reader.fields.get(f"{architecture}.rope.freq_base")
    if theta is not None and "rope_theta" in rope:
        rope["rope_theta"] = float(theta.contents())
    if rope.get("rope_type") == "default":
        rope.update(_rope_scaling(reader, architecture, rope))
        if rope["rope_type"] == "longrope":
            config.original_max_position_embeddings = rope["original_max_position_embeddings"]


def _rope_scaling(reader: gguf.GGUFReader, architecture: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary scaling in transformers' terms, from metadata or from llama.cpp's tensors."""
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    prefix = f"{architecture}.rope.scaling."
    scaling = {
        key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if key.startswith(prefix)
    }
    original = scaling.get("original_context_length")
    if "rope_freqs.weight" in tensors:
        return _llama3_scaling(np.asarray(tensors["rope_freqs.weight"].data), float(rope["rope_theta"]))
    if "rope_factors_long.weight" in tensors:
        factors = {
            f"{length}_factor": tensors[f"rope_factors_{length}.weight"].data.tolist() for length in ("short", "long")
        }
        return {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
    kind = scaling.get("type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rotary scaling {kind!r} is not supported; supported are linear, yarn and factors in tensors")
    known = {"original_max_position_embeddings": original} if original else {}
    return {"rope_type": kind, "factor": scaling["factor"], **known}


def _llama3_scaling(factors: Any, theta: float) -> dict[str, Any]:
    """Return the parameters of Llama 3.1's scaling that give `factors` [head_dim / 2]; raise ValueError if none do."""
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    turns = original / (2 * np.pi * theta ** (np.arange(len(factors)) / len(factors)))
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ValueError("its rotary factors (rope_freqs.weight) do not follow Llama 3's rule, the only supported rule")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _open(source: Path) -> gguf.GGUFReader:
    try:
        reader, *others = map(_Reader, part_paths(source))
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"not a GGUF file, or a damaged or truncated one ({error})") from error
    for other in others:
        reader.tensors += other.tensors
    if not reader.tensors:
        raise ValueError("the file holds no tensors")
    return reader


def _announce(reader: gguf.GGUFReader, folder: Path) -> None:
    """Print the plan. Raise OSError (ENOSPC) if the disk has less free space than the converted weights need."""
    weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    needed = sum(
        int(tensor.n_elements) * (4 if tensor.tensor_type == GGMLQuantizationType.F32 else 2)
        for tensor in reader.tensors
    )
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free")
    print(f"plan {needed} {_START_SECONDS + weights / _WEIGHTS_PER_SECOND:.0f}", flush=True)


def _reuse_reader(reader: gguf.GGUFReader) -> None:
    """Let transformers reuse this reader and one table of tensor names.

    It would parse the file four times and rebuild the table for every module, half of the time of a conversion.
    """
    dequantize = gguf.dequantize
    done = 0

    def dequantize_and_report(data: Any, kind: Any) -> Any:
        import torch

        from vllm_mp.core.weights.known_gguf import rounded_to_16_bits

        nonlocal done
        done += 1
        _report_part(min(done / len(reader.tensors), 1.0))
        weights = dequantize(data, kind)
        if kind in _EXACT_KINDS:
            return weights
        return rounded_to_16_bits(torch.from_numpy(np.ascontiguousarray(weights))).to(torch.float32).numpy()

    gguf.GGUFReader = lambda *_args, **_options: reader
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    gguf.dequantize = dequantize_and_report


def use_special_tokens_of_file(model: Any, reader: gguf.GGUFReader) -> None:
    """Make the configurations use the special tokens of the file, which are those of a mapped file."""
    ends, first = end_token_ids(reader), token_id(reader, "tokenizer.ggml.bos_token_id")
    for config in (model.config, model.generation_config):
        if first is not None:
            config.bos_token_id = first
        known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        if not set(ends) <= set(known):
            config.eos_token_id = ends[0] if len(ends) == 1 else ends


def _report_part(fraction: float) -> None:
    """Report that this fraction of the weights is read."""
    _report(_LOADED_AT + (_DEQUANTIZED_AT - _LOADED_AT) * fraction)


def _report(fraction: float) -> None:
    print(f"progress {fraction:.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
