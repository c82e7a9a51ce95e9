"""The functions that clean up, where programs for vLLM import them from."""

from ..distributed import (
    __getattr__ as __getattr__,
)
from ..distributed import (
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
    destroy_model_parallel,
)

__all__ = ["cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel"]
