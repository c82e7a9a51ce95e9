"""The order of the images that wait for a process, and how many may wait."""

from concurrent.futures import Future

import pytest

from vllm_mp.client.images import waiting_jobs
from vllm_mp.client.images.messages import ImageJob
from vllm_mp.client.images.waiting_jobs import WaitingJobs
from vllm_mp.errors import NoRoomError


def add(waiting, name, tenant):
    future = Future()
    waiting.add(future, ImageJob(name.encode(), b"{}"), tenant)
    return future


def take_all(waiting):
    return [waiting.take()[1].data.decode() for _ in range(len(waiting))]


def test_tenants_take_turns_and_the_images_of_each_keep_their_order():
    waiting = WaitingJobs()
    for name in ("a1", "a2", "a3", "a4"):
        add(waiting, name, 1)
    for name in ("b1", "b2"):
        add(waiting, name, 2)
    assert waiting.take()[1].data == b"a1"
    add(waiting, "c1", 3)
    assert take_all(waiting) == ["b1", "a2", "c1", "b2", "a3", "a4"]


def test_tenant_whose_images_were_removed_has_no_turn():
    waiting = WaitingJobs()
    futures = [add(waiting, name, 1) for name in ("a1", "a2")]
    add(waiting, "b1", 2)
    for future in futures:
        waiting.remove(future, 1)
        waiting.remove(future, 1)
    assert take_all(waiting) == ["b1"]


def test_images_of_one_tenant_leave_places_to_others(monkeypatch):
    monkeypatch.setattr(waiting_jobs, "_MAX_WAITING", 16)
    waiting = WaitingJobs()
    for _ in range(12):
        add(waiting, "a", 1)
    with pytest.raises(NoRoomError, match="12 images wait to be processed, 12 of them of this client or key"):
        add(waiting, "a", 1)
    for _ in range(3):
        add(waiting, "b", 2)
    with pytest.raises(NoRoomError, match="15 images wait to be processed, 3 of them"):
        add(waiting, "b", 2)
    assert len(waiting.clear()) == 15
    assert not waiting
