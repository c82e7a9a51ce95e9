"""What a core reserves on a Ray cluster, and what the cluster has."""

from typing import Any

import msgspec

from vllm_mp.config import VllmConfig


def bundle_of(config: VllmConfig, has_gpus: bool) -> dict[str, float]:
    """Return what a core needs on each of its nodes.

    It is a CPU and a GPU for each rank there, or on CPUs `num_threads` CPUs for all ranks there. `has_gpus`: the
    cluster has any. With device="auto" the core then runs on GPUs.
    """
    num_ranks, device = config.parallel_config.ranks_per_node, config.device_config
    if device.device == "cuda" or (device.device == "auto" and has_gpus):
        return {"CPU": num_ranks, "GPU": num_ranks}
    return {"CPU": max(num_ranks, device.num_threads)}


def describe_bundle(bundle: dict[str, float]) -> str:
    """Return resources as text: "2 CPU, 1 GPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) or "nothing"


def no_room(config: VllmConfig, bundle: dict[str, float], num_cores: int, nodes: list[dict[str, Any]]) -> str:
    """Return what `num_cores` cores lack on a cluster with `nodes`, as `ray.nodes()` lists them, and the remedy."""
    parallel = config.parallel_config
    totals = [{name: node["Resources"].get(name, 0.0) for name in bundle} for node in nodes if node["Alive"]]
    has = "; ".join(sorted(map(describe_bundle, totals), reverse=True)) or "no node"
    num_bundles, for_each = num_cores * parallel.nnodes, "one" if parallel.nnodes == 1 else f"nnodes={parallel.nnodes}"
    asked = f"the Ray cluster has no room for {num_bundles} x {{{describe_bundle(bundle)}}}, {for_each} for each core"
    if any(all(total[name] >= amount for name, amount in bundle.items()) for total in totals):
        remedy = "lower data_parallel_size, add nodes, or end what else runs there"
    elif parallel.ranks_per_node == 1:
        remedy = "no node has that: lower num_threads, or add a larger node"
    else:
        nnodes = _enough_nodes(config, bundle, num_cores, totals)
        give = f"give nnodes={nnodes}, which shares them among as many nodes, " if nnodes else ""
        remedy = (
            f"no node has that for {parallel.ranks_per_node} of the {parallel.world_size} ranks of a core: {give}lower "
            "tensor_parallel_size, pipeline_parallel_size or num_threads, or add a larger node"
        )
    return f"{asked}; its nodes have in all, used or not: {has}; {remedy}"


def _enough_nodes(
    config: VllmConfig, bundle: dict[str, float], num_cores: int, totals: list[dict[str, float]]
) -> int | None:
    """Return the least `nnodes` with which nodes that have `totals` hold all cores; None if there is none."""
    parallel = config.parallel_config
    for nnodes in range(parallel.nnodes + 1, parallel.world_size + 1):
        if parallel.world_size % nnodes:
            continue
        shared = msgspec.structs.replace(config, parallel_config=msgspec.structs.replace(parallel, nnodes=nnodes))
        share = bundle_of(shared, "GPU" in bundle)
        room = sum(min(total[name] // amount for name, amount in share.items()) for total in totals)
        if room >= num_cores * nnodes:
            return nnodes
    return None
