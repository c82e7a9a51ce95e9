"""The share of a model that each rank of a tensor-parallel group computes (Megatron-LM, Shoeybi et al. 2019)."""

import msgspec

from vllm_mp.model_config.architecture import Architecture, NativeArchitecture, Shard


def check_tensor_parallel(arch: Architecture, size: int, model: str) -> None:
    """Raise ValueError, naming the option and the size of the model that forbids it, unless `size` ranks can share it.

    `model` is the name that the user gave. What a model of the transformers backend allows is found at its load.
    """
    if size == 1:
        return
    option = f"tensor_parallel_size={size}"
    if not isinstance(arch, NativeArchitecture):
        return
    for name, value in _divided_sizes(arch).items():
        if value % size:
            raise ValueError(f"{option}: {name}={value} of {model} is not a multiple of it; set it to a divisor")
    kv_heads = arch.num_kv_heads
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"{option}: num_key_value_heads={kv_heads} of {model} is neither a multiple nor a divisor of it; choose "
            "another number"
        )
    if -(-arch.vocab_size // size) * (size - 1) >= arch.vocab_size:
        raise ValueError(f"{option}: vocab_size={arch.vocab_size} of {model} is too small to be shared; lower it")
    unit, what = _row_unit(arch)
    for name, value in _row_sizes(arch).items():
        if value // size % unit:
            raise ValueError(
                f"{option}: {what} of {model} cannot be cut into {value // size} inputs ({name}={value} shared among "
                f"{size} ranks): it must be a multiple of {unit}; lower tensor_parallel_size"
            )
    of_kv_heads = max(1, kv_heads // size) * arch.head_dim
    if arch.fp8 == "block" and of_kv_heads % unit:
        raise ValueError(
            f"{option}: {what} of {model} cannot be cut into {of_kv_heads} outputs of keys and values "
            f"(num_key_value_heads={kv_heads}, head_dim={arch.head_dim}): it must be a multiple of {unit}; lower "
            "tensor_parallel_size"
        )


def shard_of(arch: NativeArchitecture, rank: int, size: int) -> NativeArchitecture:
    """Return the architecture of the share of `rank` among `size` ranks, which `check_tensor_parallel` must allow.

    Heads, inner sizes and vocabulary are sizes of the share; its `shard` holds the whole architecture.
    """
    if size == 1:
        return arch
    shard = Shard(rank=rank, size=size, whole=arch)
    first, last = shard.vocabulary
    experts = arch.experts
    if experts is not None:
        experts = msgspec.structs.replace(
            experts,
            intermediate_size=experts.intermediate_size // size,
            shared_intermediate_size=experts.shared_intermediate_size // size,
        )
    return msgspec.structs.replace(
        arch,
        vocab_size=last - first,
        num_heads=arch.num_heads // size,
        num_kv_heads=max(1, arch.num_kv_heads // size),
        intermediate_size=arch.intermediate_size // size,
        experts=experts,
        shard=shard,
    )


def _divided_sizes(arch: NativeArchitecture) -> dict[str, int]:
    """Return the sizes that the number of ranks must divide, by their names in config.json."""
    sizes = {"num_attention_heads": arch.num_heads, "intermediate_size": arch.intermediate_size}
    if arch.experts is not None:
        sizes["intermediate_size of the experts"] = arch.experts.intermediate_size
        sizes["shared_expert_intermediate_size"] = arch.experts.shared_intermediate_size
    return sizes


def _row_sizes(arch: NativeArchitecture) -> dict[str, int]:
    """Return the numbers of inputs of the projections that are cut by inputs, by name."""
    return {"num_attention_heads * head_dim": arch.num_heads * arch.head_dim} | {
        name: value for name, value in _divided_sizes(arch).items() if name != "num_attention_heads"
    }


def _row_unit(arch: NativeArchitecture) -> tuple[int, str]:
    """Return the number whose multiple a cut must have as inputs, and the kind of weights that require it."""
    if arch.fp8 == "block":
        return 128, "the FP8 weights with a scale for each 128 x 128"
    if arch.blocks is not None:
        return 32, f"the weights in blocks ({arch.blocks})"
    return 1, "the weights"
