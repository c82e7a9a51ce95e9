"""Parameters of sampling, where programs for vLLM import them from."""

from vllm_mp.arguments.unserved_names import refuse
from vllm_mp.requests.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, SamplingType
from vllm_mp.requests.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]

__getattr__ = refuse(
    __name__, {"RepetitionDetectionParams": "set repetition_penalty or frequency_penalty of SamplingParams"}
)
