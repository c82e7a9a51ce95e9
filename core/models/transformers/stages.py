"""The layers of a stage in a model of transformers: all others are replaced by modules that pass hidden states on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vllm_mp.core.models.transformers.attention import Paging
from vllm_mp.core.models.transformers.probe import FAILURES, describe, equal, run_decoder
from vllm_mp.core.models.transformers.shards import CannotSplitError
from vllm_mp.model_config.architecture import Stage
from vllm_mp.model_config.pipeline_parallel import check_num_stages, share_layers


class _Skipped(nn.Module):
    """Stands in for a layer of another stage, whose plain attributes it has."""

    def __init__(self, layer: nn.Module, returns_tuple: bool) -> None:
        super().__init__()
        self._returns_tuple = returns_tuple
        plain = {key: value for key, value in vars(layer).items() if isinstance(value, str | int | float | None)}
        vars(self).update({key: value for key, value in plain.items() if key not in vars(self)})

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if self._returns_tuple else hidden_states


class StageDecoder(nn.Module):
    """A decoder of transformers in which a stage computes the layers of this stage alone."""

    def __init__(self, decoder: Any, layers: nn.ModuleList, stage: Stage, returns_tuple: bool) -> None:
        """Keep the layers of `stage` among `layers`, all layers of `decoder`."""
        super().__init__()
        self._stage = stage
        self._received: Tensor | None = None
        self._last: Any = None
        for i, layer in enumerate(layers):
            if not stage.first <= i < stage.last:
                layers[i] = _Skipped(layer, returns_tuple)
        if not stage.is_first:
            decoder.set_input_embeddings(nn.Identity())
            layers[stage.first].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not stage.is_last:
            layers[stage.last - 1].register_forward_hook(self._leave)
        self.decoder = decoder

    def forward(self, input_ids: Tensor, positions: Tensor, received: Tensor | None) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] after the layers; `received` as for `CausalLM.forward`."""
        if self._stage.is_first:
            hidden = run_decoder(self.decoder, input_ids, positions, received)
        else:
            assert received is not None
            self._received = received.unsqueeze(0)
            hidden = run_decoder(self.decoder, input_ids, positions, received)
        if self._stage.is_last:
            return hidden
        last: Tensor = self._last.squeeze(0)
        self._received = self._last = None
        return last

    def _enter(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Give the first layer what came from the stage before, instead of what the decoder makes of it."""
        if args:
            return (self._received, *args[1:]), options
        return args, options | {"hidden_states": self._received}

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        self._last = _hidden_states(output)


@torch.inference_mode()
def keep_stage(
    decoder: nn.Module, num_head_weights: int, paging: Paging, stage_index: int, num_stages: int, name: str
) -> tuple[StageDecoder, Stage]:
    """Return the decoder of stage `stage_index`, whose results were compared with the whole decoder's, and its stage.

    `paging` has the attention of all layers of the probed `decoder`, and then that of the stage. `num_head_weights` are
    the weights of the head. Raises ValueError if there are fewer layers than stages, and CannotSplitError, naming the
    option and `name`, the architecture, for a model that cannot be divided.
    """
    layers = _layers(decoder, paging)
    if layers is None:
        raise _refusal(num_stages, name, "its layers of attention are not the members of one list")
    check_num_stages(len(layers), num_stages, name)
    of_layers = sum(parameter.numel() for parameter in layers.parameters()) / len(layers)
    stage = share_layers(len(layers), num_stages, num_head_weights / of_layers)[stage_index]
    try:
        return _kept(decoder, layers, paging, stage), stage
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise _refusal(num_stages, name, describe(error)) from error


def _kept(decoder: Any, layers: nn.ModuleList, paging: Paging, stage: Stage) -> StageDecoder:
    """Return the decoder of `stage`; raise ValueError if it computes something else than the whole decoder."""
    device = next(layers.parameters()).device
    ids, positions = torch.tensor([3, 4], device=device), torch.tensor([0, 1], device=device)
    with _recording(paging), _watched(layers[stage.first], layers[stage.last - 1]) as seen:
        expected = run_decoder(decoder, ids, positions)
    before, after, returns_tuple = seen["before"], seen["after"], seen["returns_tuple"]
    kept = StageDecoder(decoder, layers, stage, returns_tuple)
    with _recording(paging):
        found = kept(ids, positions, None if stage.is_first else before)
    if not equal(found, expected if stage.is_last else after):
        raise ValueError("a layer depends on more than the hidden states of the layer before")
    own = [(module, layer) for module, layer in paging.layers.items() if stage.first <= layer.cache < stage.last]
    paging.layers = {module: layer._replace(cache=layer.cache - stage.first) for module, layer in own}
    return kept


def _layers(decoder: nn.Module, paging: Paging) -> nn.ModuleList | None:
    """Return the list with a layer for each attention module of the decoder; None if there is none."""
    attention = sorted(paging.layers, key=lambda module: paging.layers[module].cache)
    for found in decoder.modules():
        if isinstance(found, nn.ModuleList) and len(found) == len(attention):
            pairs = zip(found, attention, strict=True)
            if all(any(part is wanted for part in layer.modules()) for layer, wanted in pairs):
                return found
    return None


@contextmanager
def _recording(paging: Paging) -> Iterator[None]:
    """Let each token attend to itself alone in this block, as in the probe."""
    paging.calls = []
    try:
        yield
    finally:
        paging.calls = None


@contextmanager
def _watched(first: nn.Module, last: nn.Module) -> Iterator[dict[str, Any]]:
    """Note what `first` gets and `last` returns in this block: [num_tokens, hidden_size] each."""
    seen: dict[str, Any] = {}

    def enter(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen["before"] = (args[0] if args else options["hidden_states"]).squeeze(0).clone()

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        seen["returns_tuple"] = isinstance(output, tuple)
        seen["after"] = _hidden_states(output).squeeze(0).clone()

    hooks = [first.register_forward_pre_hook(enter, with_kwargs=True), last.register_forward_hook(leave)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _hidden_states(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _refusal(num_stages: int, name: str, reason: str) -> CannotSplitError:
    return CannotSplitError(
        f"pipeline_parallel_size={num_stages}: {name} cannot be divided into stages: {reason}; set it to 1"
    )
