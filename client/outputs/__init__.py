"""What comes back from a core: step outputs become tokens and text, streams, and the consumer's outputs."""

from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.detokenizer import IncrementalDetokenizer
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.pooling_stream import PoolingStream
from vllm_mp.client.outputs.stream import GenerationStream, RequestStream

__all__ = [
    "Completion",
    "GenerationStream",
    "IncrementalDetokenizer",
    "OutputProcessor",
    "PoolingStream",
    "RequestStream",
]
