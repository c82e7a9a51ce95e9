"""Parameters of sampling, where programs for vLLM import them from."""

from vllm_mp.requests.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm_mp.requests.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
