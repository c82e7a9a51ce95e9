"""The tasks of models under the names that programs import from `vllm.tasks`."""

from typing import Literal, get_args

GenerationTask = Literal["generate"]
PoolingTask = Literal["embed", "classify", "score"]
SupportedTask = Literal["generate", "embed", "classify", "score"]
GENERATION_TASKS: tuple[GenerationTask, ...] = get_args(GenerationTask)
POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)

__all__ = ["GENERATION_TASKS", "POOLING_TASKS", "GenerationTask", "PoolingTask", "SupportedTask"]
