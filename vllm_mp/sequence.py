"""Names that programs for older versions of vLLM import from its module for sequences."""

from vllm_mp.logprobs import Logprob, PromptLogprobs, SampleLogprobs
from vllm_mp.outputs import RequestMetrics
from vllm_mp.unserved_names import refuse

__all__ = ["Logprob", "PromptLogprobs", "RequestMetrics", "SampleLogprobs"]

__getattr__ = refuse(
    __name__,
    dict.fromkeys(
        ("ExecuteModelRequest", "IntermediateTensors", "SamplerOutput", "Sequence", "SequenceGroup", "SequenceStatus"),
        "sequences live in the core; RequestOutput has what callers get",
    ),
)
