"""Send loads through the `ContinuousBatchingPipeline` of OpenVINO GenAI, and record when every token arrived.

`tools/bench` runs this program in the environment of the package openvino-genai. Standard input holds JSON with the
path of a GGUF file, the limits of the scheduler and the loads: lists of requests, each a list of token ids, the number
of output tokens, and the time of its arrival in seconds, and with each list the parameters with which tokens are drawn,
empty for the most likely tokens. Each load begins when the one before it has ended. The
timelines of all requests, their times of sending and of their tokens in seconds, are written as JSON to the file named
on the command line.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

Request = tuple[list[int], int, float]
Times = tuple[float, list[float]]


def run_load(
    pipeline: openvino_genai.ContinuousBatchingPipeline, requests: list[Request], draw: dict[str, float]
) -> list[Times]:
    """Send each request at its time, run steps until all have ended, and return their timelines."""
    waiting = sorted(range(len(requests)), key=lambda i: requests[i][2])
    begun = time.perf_counter()
    handles, times = {}, {}
    while waiting or pipeline.has_non_finished_requests():
        now = time.perf_counter() - begun
        while waiting and requests[waiting[0]][2] <= now:
            number = waiting.pop(0)
            prompt, output_len, _ = requests[number]
            config = openvino_genai.GenerationConfig(max_new_tokens=output_len, ignore_eos=True, do_sample=bool(draw))
            config.update_generation_config(**draw)
            handles[number] = pipeline.add_request(number, openvino.Tensor(np.array([prompt], np.int64)), config)
            times[number] = now, list[float]()
        if not pipeline.has_non_finished_requests():
            time.sleep(max(0.0, requests[waiting[0]][2] - now))
            continue
        pipeline.step()
        moment = time.perf_counter() - begun
        for number, handle in handles.items():
            while handle.can_read():
                times[number][1].extend(moment for output in handle.read().values() for _ in output.generated_ids)
    for number, (_, output_len, _) in enumerate(requests):
        if len(times[number][1]) != output_len:
            sys.exit(f"OpenVINO GenAI generated {len(times[number][1])} tokens of {output_len}")
    return [times[number] for number in range(len(requests))]


def main() -> None:
    task = json.load(sys.stdin)
    config = openvino_genai.SchedulerConfig()
    for name, value in task["scheduler"].items():
        setattr(config, name, value)
    pipeline = openvino_genai.ContinuousBatchingPipeline(task["file"], config, "CPU")
    Path(sys.argv[1]).write_text(json.dumps([run_load(pipeline, *load) for load in task["loads"]]))


if __name__ == "__main__":
    main()
