"""The layers of a model that each stage of a pipeline computes (GPipe, Huang et al. 2019)."""

import itertools

import msgspec

from vllm_mp.model_config.architecture import Architecture, NativeArchitecture, Stage


def check_pipeline_parallel(arch: Architecture, num_stages: int, model: str) -> None:
    """Raise ValueError, naming the option and the cause, unless `num_stages` stages can share out the layers.

    `model` is the name that the user gave. What a model of the transformers backend allows is found at its load.
    """
    if num_stages == 1:
        return
    if arch.is_encoder:
        raise ValueError(
            f"pipeline_parallel_size={num_stages}: the layers of decoders are shared out among stages, and {model} "
            f"({arch.name}) is an encoder; set it to 1"
        )
    if isinstance(arch, NativeArchitecture):
        check_num_stages(arch.num_layers, num_stages, model)


def check_num_stages(num_layers: int, num_stages: int, model: str) -> None:
    """Raise ValueError unless each of `num_stages` can have a layer of `model`."""
    if num_stages > num_layers:
        raise ValueError(
            f"pipeline_parallel_size={num_stages}: {model} has {num_layers} layers, and each stage must have one; set "
            f"it to at most {num_layers}"
        )


def share_layers(num_layers: int, num_stages: int, head_layers: float) -> list[Stage]:
    """Return the stages of a model with `num_layers`, each with at least one layer; there must be enough of them.

    The first stage also computes the head, which takes as long as `head_layers` layers; so it has that many fewer.
    """
    if num_stages == 1:
        return [Stage(first=0, last=num_layers, num_layers=num_layers)]
    fair = round((num_layers + head_layers) / num_stages - head_layers)
    own = max(1, min(num_layers - (num_stages - 1), fair))
    others, count = num_layers - own, num_stages - 1
    borders = [0, *(own + others * index // count for index in range(num_stages))]
    return [Stage(first=first, last=last, num_layers=num_layers) for first, last in itertools.pairwise(borders)]


def stage_of(arch: NativeArchitecture, index: int, num_stages: int) -> NativeArchitecture:
    """Return the architecture of the layers of stage `index`, which `check_pipeline_parallel` must allow."""
    if num_stages == 1:
        return arch
    stage = share_layers(arch.num_layers, num_stages, _head_layers(arch))[index]
    own = slice(stage.first, stage.last)
    experts = arch.experts
    if experts is not None:
        experts = msgspec.structs.replace(experts, layers=experts.layers[own])
    return msgspec.structs.replace(
        arch,
        num_layers=stage.last - stage.first,
        sliding_window=arch.sliding_window[own],
        attention_scale=arch.attention_scale[own],
        experts=experts,
        stage=stage,
    )


def _head_layers(arch: NativeArchitecture) -> float:
    """Return the weights of the head, as a multiple of the weights with which a layer computes a token on average."""
    if not arch.has_head:
        return 0.0
    hidden, attention = arch.hidden_size, 2 * (arch.num_heads + arch.num_kv_heads) * arch.head_dim
    inner = [arch.intermediate_size] * arch.num_layers
    if arch.experts is not None:
        of_experts = arch.experts.num_chosen * arch.experts.intermediate_size + arch.experts.shared_intermediate_size
        inner = [of_experts if has_experts else arch.intermediate_size for has_experts in arch.experts.layers]
    matrices = 2 if arch.name == "GPT2LMHeadModel" else 3
    of_layer = hidden * (attention + matrices * sum(inner) / len(inner))
    return arch.vocab_size * hidden / of_layer
