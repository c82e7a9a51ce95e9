"""What a core reserves on a Ray cluster, and what the cluster has."""

from typing import Any

from vllm_mp.config import VllmConfig


def bundle_of(config: VllmConfig, has_gpus: bool) -> dict[str, float]:
    """Return the resources of a core: for each rank a CPU and a GPU, or on CPUs `num_threads` CPUs for all ranks.

    `has_gpus`: the cluster has any. With device="auto" the core then runs on GPUs.
    """
    num_ranks, device = config.parallel_config.world_size, config.device_config
    if device.device == "cuda" or (device.device == "auto" and has_gpus):
        return {"CPU": num_ranks, "GPU": num_ranks}
    return {"CPU": max(num_ranks, device.num_threads)}


def describe_bundle(bundle: dict[str, float]) -> str:
    """Return resources in words: "2 CPU, 1 GPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) or "nothing"


def no_room(config: VllmConfig, bundle: dict[str, float], num_bundles: int, nodes: list[dict[str, Any]]) -> str:
    """Return what `num_bundles` cores lack on a cluster with `nodes`, as `ray.nodes()` lists them, and the remedy."""
    totals = [{name: node["Resources"].get(name, 0.0) for name in bundle} for node in nodes if node["Alive"]]
    has = "; ".join(sorted(map(describe_bundle, totals), reverse=True)) or "no node"
    asked = f"the Ray cluster has no room for {num_bundles} x {{{describe_bundle(bundle)}}}, one for each core"
    if not any(all(total[name] >= amount for name, amount in bundle.items()) for total in totals):
        ranks = config.parallel_config.world_size
        remedy = (
            f"no node has that for the {ranks} ranks of a core, which must be on one node: lower tensor_parallel_size, "
            "pipeline_parallel_size or num_threads, or add a larger node"
            if ranks > 1
            else "no node has that: lower num_threads, or add a larger node"
        )
    else:
        remedy = "lower data_parallel_size, add nodes, or end what else runs there"
    return f"{asked}; its nodes have in all, used or not: {has}; {remedy}"
