"""The address that the parent of shared cores holds."""

import shutil
import socket
from unittest.mock import Mock

from vllm_mp import EngineArgs
from vllm_mp.client.engine.launcher import CoreLauncher


def test_address_in_a_runtime_folder_that_was_removed_is_restored_for_the_next_core(default_model, monkeypatch):
    launcher = CoreLauncher(EngineArgs(model=str(default_model)).create_engine_config())
    try:
        address = launcher.share(None, None)
        process = Mock(address=f"{address}.core")
        monkeypatch.setattr(launcher, "_start", lambda standby: process)
        shutil.rmtree(launcher.folder)
        launcher.begin()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address.removeprefix("ipc://"))
    finally:
        launcher.close(None, None)
