"""Hostile frames, and campaigns that send them to a core or to a client.

`client_frames` and `core_frames` make the frames of a hostile client and of a hostile core, with the errors of
`mutation`. `attack_on_core` and `attack_on_client` are the campaigns, `attacked_core` starts the core of the first.
`attack_on_server` sends the schemas of `random_schemas` through a server.
"""

from vllm_mp.testing.fuzzing.attack_on_client import attack_client
from vllm_mp.testing.fuzzing.attack_on_core import attack_core
from vllm_mp.testing.fuzzing.attack_on_server import attack_server, server_under_attack
from vllm_mp.testing.fuzzing.attacked_core import AttackedCore, core_under_attack
from vllm_mp.testing.fuzzing.client_frames import ClientFrames
from vllm_mp.testing.fuzzing.core_frames import CoreFrames, slots_named
from vllm_mp.testing.fuzzing.report import CampaignReport

__all__ = [
    "AttackedCore",
    "CampaignReport",
    "ClientFrames",
    "CoreFrames",
    "attack_client",
    "attack_core",
    "attack_server",
    "core_under_attack",
    "server_under_attack",
    "slots_named",
]
