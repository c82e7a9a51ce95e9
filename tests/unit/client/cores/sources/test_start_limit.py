"""The limit on the time in which a core must start: progress of its load starts it again."""

import pytest
import zmq
from support.fake_core import FakeCore

from vllm_mp import EngineArgs, EngineStartError
from vllm_mp.client.cores.sources.remote_core import RemoteCore
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.core_link.status_page import StatusPage

TIMEOUT_S = 1.0
NUM_LOOKS = 25
"""The client looks 20 times a second, so this many looks take longer than `TIMEOUT_S`."""


@pytest.fixture
def page(tmp_path):
    page = StatusPage.create(f"{tmp_path}/core.sock.status", 1)
    page.enter(CoreState.LOADING)
    return page


def connect(tmp_path, default_model, look, timeout_s=TIMEOUT_S):
    """Wait for a core whose socket is bound and which answers once `look`, called at each look, returns True."""
    config = EngineArgs(model=str(default_model)).create_engine_config()
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/core.sock")
    cores = []

    def check():
        if look() and not cores:
            cores.append(FakeCore("", config, socket=socket))

    try:
        core = RemoteCore(f"ipc://{tmp_path}/core.sock", None, timeout_s).finish(check)
        core.connection.close()
    finally:
        for each in cores:
            each.close()
        context.destroy(linger=0)


def test_load_that_makes_progress_is_waited_for_however_long_it_takes(page, tmp_path, default_model):
    looks = []

    def look():
        looks.append(None)
        if len(looks) < NUM_LOOKS:
            page.enter(CoreState.LOADING, len(looks) / NUM_LOOKS)
        return len(looks) >= NUM_LOOKS

    connect(tmp_path, default_model, look)
    assert len(looks) >= NUM_LOOKS


@pytest.mark.parametrize("state", [CoreState.LOADING, CoreState.IDLE, CoreState.STOPPED])
def test_core_that_makes_no_progress_in_its_load_is_given_up(page, tmp_path, default_model, state):
    page.enter(state)
    looks = []

    def look():
        looks.append(None)
        if state != CoreState.LOADING:
            page.beat()  # the beats of a core that serves, and does not answer, are no progress of a load
        return len(looks) > 100 * NUM_LOOKS

    with pytest.raises(EngineStartError, match="did not answer"):
        connect(tmp_path, default_model, look, timeout_s=0.3)
