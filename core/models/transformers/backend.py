"""Any decoder that transformers can run, over the paged KV cache.

The module is transformers' own. Its attention goes through the library's registry of attention functions, which holds
ours (transformers_attention.py): it writes keys and values into the cache and attends over it, so that the sequences
of a step can lie one behind the other in a batch of one. A probe of the loaded model (transformers_probe.py) decides
whether that computes the same.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hub_logging

from vllm_mp.config import ModelConfig
from vllm_mp.core.collectives.group import ALONE, RankGroup
from vllm_mp.core.models.attention_layer import AttentionLayer
from vllm_mp.core.models.transformers.attention import SERVING, Paging
from vllm_mp.core.models.transformers.probe import (
    FAILURES,
    cannot_run,
    check_class,
    compute_logits,
    describe,
    embed_input_ids,
    probe,
    run_decoder,
)
from vllm_mp.core.models.transformers.shards import CannotSplitError, split_model
from vllm_mp.core.models.transformers.stages import StageDecoder, keep_stage
from vllm_mp.core.weights.checkpoint import CheckpointMismatchError, count_parameters, listed
from vllm_mp.core.weights.checkpoint_files import read_tensors
from vllm_mp.core.weights.dummy import fill_with_dummy_weights
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import AttentionMetadata, TokenMasks
from vllm_mp.model_config.architecture import Architecture
from vllm_mp.model_store.folder import checkpoint_files

logger = logging.getLogger(__name__)


class TransformersForCausalLM(AttentionLayer):
    """A causal language model of transformers; `vllm_mp.core.models.CausalLM` is the contract."""

    def __init__(self, causal: Any, arch: Architecture, max_model_len: int, takes_prompt_embeds: bool = False) -> None:
        """Take over `causal`, a model with its weights and our attention.

        `takes_prompt_embeds`: `forward` will be given embeddings. Raises ValueError, naming the architecture and the
        cause, if its results differ from transformers' results.
        """
        super().__init__()
        self._paging = Paging()
        for module in causal.modules():
            module.paging = self._paging
        self.causal = causal
        self.num_parameters: int = count_parameters(causal)
        head = causal.get_output_embeddings()
        self._num_head_weights = 0 if head is None else sum(weight.numel() for weight in head.parameters())
        try:
            self.decoder, self.kv_shapes = probe(causal, self._paging, arch, max_model_len, takes_prompt_embeds)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            raise cannot_run(arch.name, describe(error)) from error

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        paging = self._paging
        paging.attend, paging.kv_caches, paging.metadata = self.attend, kv_caches, metadata
        if isinstance(self.decoder, StageDecoder):
            hidden: Tensor = self.decoder(input_ids, positions, inputs_embeds)
        else:
            hidden = run_decoder(self.decoder, input_ids, positions, inputs_embeds)
        # The caches belong to the caller, which may free their memory between steps.
        paging.kv_caches, paging.metadata = [], None
        return hidden

    def keep_stage(self, stage_index: int, num_stages: int, name: str) -> None:
        """Keep the layers of stage number `stage_index`, and embedding and head in the first stage.

        Raises ValueError, naming option and architecture, for a model that cannot be divided into `num_stages`.
        """
        if num_stages == 1:
            return
        self.decoder, stage = keep_stage(
            self.decoder, self._num_head_weights, self._paging, stage_index, num_stages, name
        )
        self.kv_shapes = self.kv_shapes[stage.first : stage.last]
        if not stage.is_first:
            self.causal = nn.Module()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        decoder = self.decoder.decoder if isinstance(self.decoder, StageDecoder) else self.decoder
        return embed_input_ids(decoder, input_ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return compute_logits(self.causal, hidden)

    def argmax(self, hidden: Tensor, masks: TokenMasks | None = None) -> Tensor:
        return ops.masked_argmax(self.compute_logits(hidden), masks)


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
    group: RankGroup = ALONE,
    stage: int = 0,
    num_stages: int = 1,
) -> TransformersForCausalLM:
    """Return the model of `config` on `device`, with the weights that `config.load_format` asks for.

    It holds the share of the rank in `group`, of the layers of `stage`.

    `progress` is called with the fraction done. Raises ValueError, naming architecture or folder, cause and remedy,
    for a model that cannot run here, and for weights that are absent, damaged or belong to another model.
    """
    arch = config.architecture
    if arch.reason_not_native:
        logger.warning(
            "%s has no native module for this configuration and runs as transformers' own, which may be slower: %s",
            arch.name,
            arch.reason_not_native,
        )
    model_class, hub_config = _find_class(arch, config)
    check_class(arch, model_class, hub_config, config.max_model_len)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": SERVING}
    tensors = {} if config.load_format == "dummy" else dict(read_tensors(checkpoint_files(config.folder), None))
    try:
        if config.load_format == "dummy":
            with device:
                causal = AutoModelForCausalLM.from_config(hub_config, **options).eval()
            fill_with_dummy_weights(causal, config.weights_seed)
            num_parameters = count_parameters(causal)
            split_model(causal, group, arch.name)
        else:
            with _followed(lambda share: progress(share / 2)):
                causal, report = model_class.from_pretrained(
                    None,
                    config=hub_config,
                    state_dict=tensors,
                    device_map={"": device},
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    **options,
                )
            _check_report(report, config.folder, _head_parameters(causal) if not arch.has_head else set())
            num_parameters = count_parameters(causal)
            split_model(causal, group, arch.name)
    except (torch.OutOfMemoryError, CheckpointMismatchError, CannotSplitError):
        raise
    except (ImportError, *FAILURES) as error:
        also = f" ({arch.reason_not_native})" if arch.reason_not_native else ""
        raise cannot_run(arch.name, describe(error) + also) from error
    causal.requires_grad_(False)
    model = TransformersForCausalLM(causal, arch, config.max_model_len, config.enable_prompt_embeds)
    model.keep_stage(stage, num_stages, arch.name)
    _own(model, tensors, lambda share: progress((1 + share) / 2))
    progress(1.0)
    model.num_parameters = num_parameters
    return model


def _find_class(arch: Architecture, config: ModelConfig) -> tuple[Any, Any]:
    """Return the class of transformers that runs the model of `config`, and its configuration."""
    folder = config.folder
    try:
        hub_config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a bad configuration raises errors of any type
        if "auto_map" in config.hf_config and config.hf_config.get("model_type") not in CONFIG_MAPPING:
            raise cannot_run(
                arch.name,
                f"the model brings code of its own ('auto_map' in {folder / 'config.json'}), which is never run: "
                "trust_remote_code=True only allows that of a tokenizer; use a model of an architecture that "
                "transformers has",
            ) from error
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise cannot_run(arch.name, f"transformers cannot read {folder / 'config.json'}: {reason}") from error
    if type(hub_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise cannot_run(
            arch.name, f"transformers has no decoder-only language model of model_type {hub_config.model_type!r}"
        )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(hub_config)]
    if not hasattr(transformers, arch.name):
        logger.warning(
            "config.json names the architecture %r, which transformers does not have; by its model_type %r the model "
            "runs as %s",
            arch.name,
            hub_config.model_type,
            model_class.__name__,
        )
    return model_class, hub_config


@contextlib.contextmanager
def _followed(progress: Callable[[float], None]) -> Iterator[None]:
    """Call `progress` for every parameter that transformers fills in this block, instead of its progress bar."""

    def follow(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not args or not hasattr(args[0], "__len__"):
            return bar(*args, **options)

        def each() -> Iterator[Any]:
            for done, item in enumerate(args[0]):
                progress(done / len(args[0]))
                yield item

        return each()

    before = hub_logging.set_tqdm_hook(follow)
    try:
        yield
    finally:
        hub_logging.set_tqdm_hook(before)


@torch.no_grad()
def _own(model: nn.Module, tensors: Mapping[str, Tensor], progress: Callable[[float], None]) -> None:
    """Copy the parameters that still share memory with the mapped `tensors` of a file, which may change."""
    mapped = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    parameters = list(model.parameters())
    for done, parameter in enumerate(parameters):
        if parameter.untyped_storage().data_ptr() in mapped:
            parameter.data = parameter.data.clone()
        progress(done / len(parameters))


def _head_parameters(causal: Any) -> set[str]:
    """Return the names of the parameters of a model's head."""
    head = causal.get_output_embeddings()
    of_head = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    return {name for name, parameter in causal.named_parameters() if id(parameter) in of_head}


def _check_report(report: Mapping[str, Any], folder: Path, unused: set[str]) -> None:
    """Raise CheckpointMismatchError if the weights, except `unused` ones, do not fit the model.

    transformers only warns of that, and draws missing parameters at random.
    """
    problems = [f"missing {name}" for name in sorted(set(report["missing_keys"]) - unused)]
    problems += [f"unexpected {name}" for name in sorted(report["unexpected_keys"])]
    problems += [
        f"{name} has shape {list(found)}, not {list(expected)}"
        for name, found, expected in sorted(report["mismatched_keys"])
    ]
    problems += report["error_msgs"]
    if problems:
        raise CheckpointMismatchError(
            f"{folder}: {listed(problems)}. Check that config.json and the weights belong to the same model."
        )
