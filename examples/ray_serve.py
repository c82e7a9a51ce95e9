"""Serve completions with Ray Serve, which starts further replicas while requests queue, and ends them later.

pip install 'ray[serve]'
python examples/ray_serve.py [MODEL]
curl -N -d 'Once upon a time' http://127.0.0.1:8000/
"""

import sys
from collections.abc import AsyncIterator

from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from vllm_mp import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams


@serve.deployment(
    # More requests than a replica works at wait in Serve's queue.
    max_ongoing_requests=64,
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 16},
    ray_actor_options={"num_cpus": 1},  # for a model on GPUs: "num_gpus": 1
)
class Completions:
    """A replica: an engine whose core is a process beside it, with the resources of the replica."""

    def __init__(self, model: str) -> None:
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, num_threads=1))

    async def __call__(self, request: Request) -> StreamingResponse:
        prompt = (await request.body()).decode()
        return StreamingResponse(self.stream(prompt), media_type="text/plain")

    async def stream(self, prompt: str) -> AsyncIterator[str]:
        params = SamplingParams(temperature=0.8, max_tokens=64, output_kind=RequestOutputKind.DELTA)
        async for output in self.llm.generate(prompt, params):
            yield output.outputs[0].text

    def check_health(self) -> None:
        # A core that died is replaced, and its streams continue: only its end for good needs another replica.
        if (error := self.llm.dead_error) is not None:
            raise error

    def __del__(self) -> None:
        self.llm.shutdown()


def app(args: dict[str, str]) -> serve.Application:
    """Return the application, also for `serve run ray_serve:app model=MODEL`."""
    return Completions.bind(args.get("model", "smollm2-135m-instruct"))


if __name__ == "__main__":
    serve.run(app({"model": sys.argv[1]} if len(sys.argv) > 1 else {}), blocking=True)
