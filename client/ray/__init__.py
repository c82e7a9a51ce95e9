"""Cores on the nodes of a Ray cluster.

Only the driver process and the actors import Ray. The client has neither Ray's memory nor its end: Ray ends a process
that has lost its cluster.
"""

from vllm_mp.client.ray.driver_process import DriverProcess
from vllm_mp.client.ray.ray_core import RayCore

__all__ = ["DriverProcess", "RayCore"]
