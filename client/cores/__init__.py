"""The client's core: its process, its socket, its supervision and replacement, and the replay to its successor."""

from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.cores.core_client import EngineCoreClient
from vllm_mp.client.cores.core_group import CoreGroup
from vllm_mp.client.cores.recovery.restart_limit import RestartLimit
from vllm_mp.client.cores.sources.launcher import CoreLauncher
from vllm_mp.client.cores.sources.remote_core import RemoteCore
from vllm_mp.client.cores.supervisor import CoreSupervisor

__all__ = [
    "CoreConnection",
    "CoreGroup",
    "CoreLauncher",
    "CoreSupervisor",
    "EngineCoreClient",
    "RemoteCore",
    "RestartLimit",
]
