"""The group by torch.distributed, which GPUs use, with Gloo on CPUs."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, torch
from vllm_mp.core.parallel.torch_group import TorchGroup
rank = int(sys.argv[2])
group = TorchGroup(sys.argv[1], rank, 2, torch.device("cpu"), 60.0)
x = torch.arange(3.0) + rank
print(json.dumps([
    group.sum(x.clone()).tolist(),
    [part.tolist() for part in group.gather(x)],
    group.broadcast(x.clone()).tolist(),
    group.minimum(7 - rank),
]))
group.close()
"""


@pytest.mark.slow
def test_ranks_that_meet_in_a_private_file_compute_together(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "meeting"), str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    first, second = (json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks)
    assert first == [[1.0, 3.0, 5.0], [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]], [0.0, 1.0, 2.0], 6]
    assert second == [[1.0, 3.0, 5.0], [], [0.0, 1.0, 2.0], 6]
