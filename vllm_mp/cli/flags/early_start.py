"""The first thing that a command does which will run an engine."""

from vllm_mp.config.engine_args import EngineArgs
from vllm_mp.core_link.early_template import start_template_early


def begin_core(engine_args: EngineArgs) -> None:
    """Let the process that forks the core import what a core needs, while this process imports what it needs.

    No-op if no such process forks the core. The environment and the limits of this process must not change afterwards.
    """
    is_on_ray = engine_args.data_parallel_backend == "ray" or engine_args.engine_use_ray
    if engine_args.recovery and engine_args.core_template and not is_on_ray:
        start_template_early()
