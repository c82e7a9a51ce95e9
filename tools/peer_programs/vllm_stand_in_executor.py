"""A stand-in for the model of vLLM: an executor that computes nothing and samples recorded tokens, a step at a time.

`tools/bench front` starts vLLM's server with it, to measure what the server process costs. Only vLLM's environment has
the modules that it imports:

    vllm serve MODEL --enforce-eager --distributed-executor-backend vllm_stand_in_executor.StandInExecutor

The environment variable STAND_IN_TOKENS names a JSON file with the token ids that every request gets, again and again;
STAND_IN_STEP_S is the time from each step to the next, in seconds.
"""

import json
import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput


class StandInExecutor(UniProcExecutor):
    """vLLM's executor in the core process, with a model that is loaded and never run."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._tokens: list[int] = json.loads(Path(os.environ["STAND_IN_TOKENS"]).read_text())
        self._step_s = float(os.environ["STAND_IN_STEP_S"])
        self._next_step = 0.0
        self._prompt_lens: dict[str, int] = {}

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Wait until the next step is due. Return a token for each request whose prompt is computed."""
        self._next_step = max(self._next_step + self._step_s, time.monotonic())
        time.sleep(max(0.0, self._next_step - time.monotonic()))
        output = self._sample(scheduler_output)
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def _sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in scheduled.finished_req_ids:
            self._prompt_lens.pop(request_id, None)
        computed = {}
        for request in scheduled.scheduled_new_reqs:
            self._prompt_lens[request.req_id] = request.prompt_len
            computed[request.req_id] = request.num_computed_tokens
        known = scheduled.scheduled_cached_reqs
        computed.update(zip(known.req_ids, known.num_computed_tokens, strict=True))
        sampled: list[list[int]] = []
        for request_id, position in computed.items():
            # Number of the output token that follows the tokens computed in this step; negative within the prompt.
            number = position + scheduled.num_scheduled_tokens[request_id] - self._prompt_lens[request_id]
            sampled.append([self._tokens[number % len(self._tokens)]] if number >= 0 else [])
        indices = {request_id: index for index, request_id in enumerate(computed)}
        return ModelRunnerOutput(req_ids=list(computed), req_id_to_index=indices, sampled_token_ids=sampled)
