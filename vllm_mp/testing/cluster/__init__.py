"""A simulation of the routing of requests over many cores, from recorded step times.

`traces` draws or reads requests, `cluster` runs them over fronts and cores, and `report` makes figures of the result.
A `core` follows the scheduler, with a `prefix_cache`; its steps take the time of `step_times`, a model of steps that
`step_recorder` records on a real core. `policies` has the client's router and simple policies, `oracle` the one that
knows everything. `step_recorder` is not imported here, because it needs torch.
"""

from vllm_mp.testing.cluster.cluster import POLICIES, Cluster, ClusterOptions, Outcome
from vllm_mp.testing.cluster.core import CoreLimits
from vllm_mp.testing.cluster.report import figures, table
from vllm_mp.testing.cluster.step_times import RECORDED, StepModel, errors, fit, load_recorded
from vllm_mp.testing.cluster.traces import Drawing, Lengths, TraceRequest, at_rate, draw, read

__all__ = [
    "POLICIES",
    "RECORDED",
    "Cluster",
    "ClusterOptions",
    "CoreLimits",
    "Drawing",
    "Lengths",
    "Outcome",
    "StepModel",
    "TraceRequest",
    "at_rate",
    "draw",
    "errors",
    "figures",
    "fit",
    "load_recorded",
    "read",
    "table",
]
