"""What programs for vLLM call to clean up after an engine; here the engine cleans up after itself."""

from vllm_mp.arguments.unserved_names import refuse

__all__ = ["cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel"]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Return at once: `shutdown` of an engine ends its processes, which hold all of its memory."""


def destroy_model_parallel() -> None:
    """Return at once: the ranks of an engine end with it."""


def destroy_distributed_environment() -> None:
    """Return at once: this process takes part in no group of processes."""


__getattr__ = refuse(
    __name__,
    dict.fromkeys(
        ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size", "get_world_group"),
        "the ranks are processes of the core; vllm_config.parallel_config has their number",
    ),
)
