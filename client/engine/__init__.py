"""The client's core: its process, its socket, its supervision and replacement, and the replay to its successor."""

from vllm_mp.client.engine.connection import CoreConnection
from vllm_mp.client.engine.core_client import EngineCoreClient
from vllm_mp.client.engine.core_group import CoreGroup
from vllm_mp.client.engine.launcher import CoreLauncher, RemoteCore
from vllm_mp.client.engine.restart_limit import RestartLimit
from vllm_mp.client.engine.supervisor import CoreSupervisor

__all__ = [
    "CoreConnection",
    "CoreGroup",
    "CoreLauncher",
    "CoreSupervisor",
    "EngineCoreClient",
    "RemoteCore",
    "RestartLimit",
]
