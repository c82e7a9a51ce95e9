"""Which clients find a place at a core that has as many as it may have."""

import pytest

from vllm_mp import wire
from vllm_mp.core.ipc import client_places
from vllm_mp.core.ipc.client_places import ClientPlaces


def fill(places, owner, **options):
    """Take places for `owner` until there is none; return how many there were."""
    count = 0
    while fits(places, owner, **options):
        places.take(owner, b"")
        count += 1
    return count


def fits(places, owner, token=b"", is_operator=False):
    try:
        places.check(owner, token, is_operator)
    except ValueError:
        return False
    return True


def test_owner_takes_most_places_while_no_other_asks_and_leaves_some_for_each_other():
    places = ClientPlaces()
    shares = [fill(places, f"process {number}") for number in range(4)]
    assert shares[0] > 0.7 * wire.MAX_CLIENTS
    assert min(shares) > 40
    assert fill(places, "process 0", is_operator=True) >= 64
    assert not fits(places, "process 9", is_operator=True), "the limit holds for operators too"


def test_place_that_a_client_gives_back_is_free_for_its_owner():
    places = ClientPlaces()
    fill(places, "process 1")
    places.give_back("process 1")
    assert fits(places, "process 1")
    places.take("process 1", b"")
    with pytest.raises(ValueError, match=r"limit is 4096, of which process 1 has 3024 and may have 3024; close some"):
        places.check("process 1", b"", False)


def test_places_of_clients_that_do_not_come_back_are_free_after_a_while(monkeypatch):
    tokens = [bytes([i, j]) for i in range(16) for j in range(250)]
    places = ClientPlaces(tokens)
    before = fill(places, "process 1")
    assert before < 100
    assert fits(places, "process 1", tokens[0])
    monkeypatch.setattr(client_places, "_RETURN_S", -1.0)
    later = ClientPlaces(tokens)
    assert fits(later, "process 1", tokens[0])
    assert fill(later, "process 1") > 3000
