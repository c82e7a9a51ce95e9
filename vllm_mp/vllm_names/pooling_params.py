"""Parameters of pooling, where programs for vLLM import them from."""

from vllm_mp.requests.pooling_params import PoolingParams

__all__ = ["PoolingParams"]
