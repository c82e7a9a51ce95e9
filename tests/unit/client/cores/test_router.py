"""The choice of a core for each request, from what a client has sent."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mp import wire
from vllm_mp.client.cores.router import CHUNK_TOKENS, RUNNING_COST, RoutedRequest, Router, prefix_hashes

CACHE_TOKENS = 100_000


def make_router(num_cores=3, cache_tokens=CACHE_TOKENS, seed=None):
    router = Router(seed=seed)
    for core in range(num_cores):
        router.add_core(core, cache_tokens)
    return router


def request(num_tokens, first_token=0, num_completions=1, root=None, shared=None):
    """Return a request whose prompt counts up from `first_token` after `shared` tokens that count up from 0."""
    ids = [*range(shared or 0), *range(first_token, first_token + num_tokens - (shared or 0))]
    return RoutedRequest(num_tokens, num_completions, prefix_hashes(wire.pack_ids(ids), root))


def send(router, routed, cores=(0, 1, 2)):
    return router.place(routed, router.choose(routed, cores))


def test_equal_requests_without_a_common_prefix_go_round():
    router = make_router()
    assert [send(router, request(200, 1000 * i)).core for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_each_seed_gives_equal_cores_an_order_of_its_own():
    orders = set()
    for seed in range(20):
        router = make_router(seed=seed)
        chosen = [send(router, request(200, 1000 * i)).core for i in range(6)]
        assert sorted(chosen[:3]) == [0, 1, 2]
        assert chosen[3:] == chosen[:3]
        orders.add(tuple(chosen))
        again = make_router(seed=seed)
        assert [send(again, request(200, 1000 * i)).core for i in range(6)] == chosen
    assert len(orders) == 6


def test_request_goes_where_the_fewest_tokens_are_left_to_read():
    router = make_router()
    for core, num_tokens in enumerate((5000, 400, 3000)):
        router.place(request(num_tokens, 10_000 * core), core)
    assert router.choose(request(100, 90_000), (0, 1, 2)) == 1


def test_core_that_has_read_its_prompts_is_charged_for_running_completions_only():
    router = make_router(2)
    long = router.place(request(5000), 0)
    for i in range(3):
        router.note_read(router.place(request(64, 10_000 * i + 10_000), 1))
    assert router.choose(request(64, 90_000), (0, 1)) == 1
    router.note_read(long)
    assert router.choose(request(64, 90_000), (0, 1)) == 0


def test_request_goes_where_its_prefix_is_unless_that_costs_more_than_reading_it_again():
    router = make_router(2)
    prefix = 10 * CHUNK_TOKENS
    first = router.place(request(prefix + 10), 1)
    router.note_read(first)
    later = [request(prefix + 10, 5000 + i, shared=prefix) for i in range(40)]
    chosen = [send(router, each, (0, 1)) for each in later]
    for placement in chosen:
        assert placement.num_unread in (10, prefix + 10)
    busy = prefix // int(RUNNING_COST)
    cores = [placement.core for placement in chosen]
    assert cores[: busy // 2] == [1] * (busy // 2)
    assert 0 in cores, "the prefix is copied once the core that holds it is busy"


def test_prefixes_with_another_salt_are_not_shared():
    router = make_router(2)
    router.note_end(router.place(request(640, root=("tenant", None)), 1), False)
    assert router.choose(request(640, root=("tenant", None)), (0, 1)) == 1
    assert router.choose(request(640, root=("other", None)), (0, 1)) == 0


def test_only_whole_chunks_of_a_common_beginning_count():
    router = make_router(2)
    router.note_end(router.place(request(3 * CHUNK_TOKENS + 5), 1), False)
    shared = 2 * CHUNK_TOKENS + 7
    placement = router.place(request(1000, 5000, shared=shared), 1)
    assert placement.num_unread == 1000 - 2 * CHUNK_TOKENS


def test_prefixes_are_forgotten_in_the_order_of_their_use_when_the_cache_is_full():
    router = make_router(2, cache_tokens=4 * CHUNK_TOKENS)
    for i in range(3):
        router.note_end(router.place(request(2 * CHUNK_TOKENS, 10_000 * i), 1), False)
    assert router.place(request(2 * CHUNK_TOKENS), 1).num_unread == 2 * CHUNK_TOKENS
    assert router.place(request(2 * CHUNK_TOKENS, 20_000), 1).num_unread == 0


def test_core_without_room_in_its_cache_is_avoided():
    router = make_router(2, cache_tokens=1000)
    router.note_read(router.place(request(950), 0))
    router.place(request(400, 10_000), 1)
    assert router.choose(request(300, 20_000), (0, 1)) == 1


def test_another_core_has_an_empty_cache():
    router = make_router(2)
    router.note_end(router.place(request(640), 1), False)
    router.forget_prefixes(1)
    assert router.choose(request(640), (0, 1)) == 0


def test_completions_of_a_request_count_each():
    router = make_router(2)
    router.note_read(router.place(request(64, num_completions=8), 0))
    for i in range(4):
        router.note_read(router.place(request(64, 1000 * i), 1))
    assert router.choose(request(64, 9000), (0, 1)) == 1


def test_core_that_is_added_after_another_was_removed_begins_without_prefixes():
    router = make_router(2)
    router.place(request(640), 1)
    router.remove_core(1)
    router.add_core(2, CACHE_TOKENS)
    assert router.place(request(640), 2).num_unread == 640


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_nothing_is_left_when_all_requests_have_ended(seed):
    rng = random.Random(seed)
    router = make_router(3, cache_tokens=20 * CHUNK_TOKENS)
    live = []
    for _ in range(60):
        if live and rng.random() < 0.5:
            placement, was_read = live.pop(rng.randrange(len(live)))
            router.note_end(placement, was_read)
        elif live and rng.random() < 0.3:
            index = rng.randrange(len(live))
            placement, was_read = live[index]
            if not was_read:
                router.note_read(placement)
                live[index] = placement, True
        else:
            shared = rng.choice([0, 100, 200])
            live.append(
                (send(router, request(shared + rng.randrange(1, 900), rng.randrange(5) * 1000, shared=shared)), False)
            )
        if rng.random() < 0.05:
            router.forget_prefixes(rng.randrange(3))
    for placement, was_read in live:
        router.note_end(placement, was_read)
    for core in router._cores.values():
        assert (core.unread, core.held, core.running) == (0, 0, 0)
        assert len(core.prefixes) <= 20
        assert all(router._holders[prefix] & core.bit for prefix in core.prefixes)
    assert sum(mask.bit_count() for mask in router._holders.values()) == sum(
        len(core.prefixes) for core in router._cores.values()
    )


def test_hash_of_a_chunk_depends_on_all_tokens_before_it():
    one, other = prefix_hashes(wire.pack_ids([1] * 200), None), prefix_hashes(wire.pack_ids([2] + [1] * 199), None)
    assert len(one) == len(other) == 200 // CHUNK_TOKENS
    assert not set(one) & set(other)
    assert prefix_hashes(b"", None) == []


@pytest.mark.parametrize("num_cores", [1, 70])
def test_any_number_of_cores_is_served(num_cores):
    router = make_router(num_cores)
    assert [send(router, request(64, 1000 * i), range(num_cores)).core for i in range(num_cores)] == [*range(num_cores)]
