"""Where the requests of an engine with several cores go: at first, when a core dies, and when one is removed."""

import asyncio

import pytest
from support.stand_in_core import StandInSupervisor

from vllm_mp import EngineDeadError, EngineError, EngineGenerateError, EngineStartError, SamplingParams, wire
from vllm_mp.client.cores.core_group import CoreGroup
from vllm_mp.client.cores.recovery.news import Absence, Death, End
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import GenerationStream
from vllm_mp.client.prompts.request import GenerationRequest
from vllm_mp.client.stats import EngineStats


class Engine:
    """A group of cores."""

    def __init__(self, num_cores=2, is_shared=False, number=0):
        self.stats = EngineStats(64, False)
        self.requests = LiveRequests(self.stats.note_end)
        self.cores = [StandInSupervisor(is_shared, number) for _ in range(num_cores)]
        self.group = CoreGroup(list(self.cores), self.requests, self.stats)
        self.time = 0.0

    def add(self, name, rank=None, n=1, ids=None):
        params = SamplingParams(seed=1, n=n)
        ids = ids or [ord(letter) for letter in name]
        request = GenerationRequest(name, "", ids, wire.pack_ids(ids), params, 0.0)
        stream = GenerationStream(request, [Completion(i, params) for i in range(n)])
        self.requests.reserve(name)
        self.group.attach()
        self.group.client_for(stream, rank).add(stream)
        self.stats.note_sent(stream, 0.0, {})
        return stream

    def die(self, rank, *streams, outside=False, left=None):
        """Let a core die with `streams` in its step and `left` restarts; -1: let it be gone for good."""
        core, client = self.cores[rank], self.group.client(rank)
        core.num_deaths += 1
        self.time += 1.0
        in_step = {awaited.slot: awaited.num_tokens for stream in streams for awaited in stream.awaited}
        death = Death("it died; log", in_step, len(in_step), outside, time=self.time, num_restarts_left=left)
        core.last_death = wire.LastDeath(
            core.num_deaths - 1,
            "it died",
            "signal",
            outside,
            len(in_step),
            list(in_step.items()),
            model=core.core.digest,
        )
        if core.is_shared:
            death = death._replace(in_step={}, num_in_step=0, is_from_outside=True, is_step_known=False)
        if death.is_final:
            core.end = "it died too often"
            client._on_end(End(core.end, death))
        else:
            client._on_death(death)
        core.sent.clear()

    def rejoin(self, rank):
        """Let the next core serve."""
        core = self.cores[rank]
        core.core = core.start(core.last_death)
        self.group.client(rank)._replay_to(core.core)

    def sent(self, rank):
        """Return the ids of the requests that a core was sent since the last call, with their isolation groups."""
        sent = [(m.request_id, m.isolation_group) for m in self.cores[rank].sent if isinstance(m, wire.AddRequest)]
        self.cores[rank].sent.clear()
        return sent

    def give_token(self, rank, *streams, position=0):
        slots = b"".join(stream.awaited[0].slot.to_bytes(2, "little") for stream in streams)
        count = len(streams)
        columns = (slots, bytes([5, 0, 0, 0]) * count, position.to_bytes(2, "little") * count)
        self.cores[rank].on_message(wire.StepOutput(self.cores[rank].num_deaths, 1, *columns))


def run(test):
    """Run a test with a running loop."""

    async def main():
        result = test()
        if asyncio.iscoroutine(result):
            await result

    asyncio.run(main())


def names(sent):
    return [name for name, _ in sent]


def test_requests_are_spread_and_a_pinned_one_goes_to_its_core():
    def test():
        engine = Engine()
        for name in "abcd":
            engine.add(name)
        assert names(engine.sent(0)) == ["a", "c"]
        assert names(engine.sent(1)) == ["b", "d"]
        engine.add("e", rank=1)
        assert names(engine.sent(1)) == ["e"]

    run(test)


def test_clients_of_shared_cores_begin_with_different_cores():
    def test():
        engines = [Engine(8, is_shared=True, number=number) for number in range(1, 9)]
        for engine in engines:
            engine.add("a")
        chosen = [next(rank for rank in range(8) if engine.sent(rank)) for engine in engines]
        assert len(set(chosen)) > 3

    run(test)


def test_rank_that_no_core_has_is_refused():
    group = Engine().group
    group.check_rank(None)
    group.check_rank(1)
    for rank in (2, -1, True):
        with pytest.raises(ValueError, match=f"data_parallel_rank={rank!r}: the ranks are 0, 1; leave it None"):
            group.check_rank(rank)


def test_all_completions_of_a_request_go_to_one_core():
    def test():
        engine = Engine()
        engine.add("a", n=3)
        assert names(engine.sent(0)) == ["a"] * 3
        assert engine.sent(1) == []

    run(test)


def test_other_cores_go_on_with_the_requests_of_a_core_that_is_killed():
    def test():
        engine = Engine(3)
        streams = [engine.add(name) for name in "abcdef"]
        engine.give_token(0, streams[0], streams[3])
        for rank in (1, 2):
            engine.sent(rank)
        engine.die(0, streams[0], streams[3], outside=True)
        moved = [engine.cores[rank].sent[0] for rank in (1, 2)]
        assert [message.request_id for message in moved] == ["a", "d"], "they are spread"
        assert all(message.output == wire.pack_ids([5]) for message in moved), "with the tokens so far"
        engine.rejoin(0)
        assert engine.sent(0) == []
        engine.add("later")
        assert names(engine.sent(0)) == ["later"]

    run(test)


def test_tokens_of_a_moved_request_are_taken_from_its_new_core_only():
    def test():
        engine = Engine()
        stream = engine.add("a", rank=0)
        engine.give_token(0, stream)
        old = engine.cores[0].on_message
        engine.die(0, stream, outside=True)
        engine.give_token(1, stream, position=1)
        columns = (bytes(2), bytes([9, 0, 0, 0]), (2).to_bytes(2, "little"))
        old(wire.StepOutput(0, 9, *columns))
        assert list(stream.completions[0].token_ids) == [5, 5]
        engine.give_token(1, stream, position=2)
        assert list(stream.completions[0].token_ids) == [5, 5, 5]

    run(test)


def test_prompt_of_a_moved_request_counts_as_read_after_the_first_token_from_its_new_core():
    def test():
        engine = Engine()
        moved = engine.add("m", rank=0, ids=list(range(200)))
        engine.give_token(0, moved)
        engine.die(0, outside=True)
        engine.rejoin(0)
        engine.add("company", rank=0, n=2)
        engine.sent(0), engine.sent(1)
        engine.add("early")
        assert names(engine.sent(0)) == ["early"], "the other core has a long prompt to read"
        engine.give_token(1, moved, position=1)
        engine.add("later")
        assert names(engine.sent(1)) == ["later"]

    run(test)


def test_moved_request_that_ends_before_a_token_is_not_waited_for():
    def test():
        engine = Engine()
        engine.add("a", rank=0)
        engine.die(0, outside=True)
        assert len(engine.group._moved_unread) == 1
        engine.group.abort("a")
        assert not engine.group._moved_unread

    run(test)


def test_requests_wait_for_the_first_core_that_comes_back_if_all_have_died():
    def test():
        engine = Engine()
        streams = [engine.add("a", rank=0), engine.add("b", rank=1)]
        engine.die(0, outside=True)
        engine.die(1, outside=True)
        engine.add("c")
        assert engine.sent(0) == engine.sent(1) == []
        engine.rejoin(0)
        assert sorted(names(engine.sent(0))) == ["a", "b", "c"]
        engine.rejoin(1)
        assert engine.sent(1) == []
        assert not any(stream.is_over for stream in streams)

    run(test)


def test_requests_that_may_have_caused_a_death_move_to_one_core_together():
    def test():
        engine = Engine(3)
        in_step = [engine.add(name, rank=0) for name in "abcd"]
        others = [engine.add(name, rank=0) for name in "efgh"]
        engine.die(0, *in_step)
        sent = [names(engine.sent(rank)) for rank in (1, 2)]
        assert sorted(map(len, sent)) == [2, 6] or sorted(map(len, sent)) == [4, 4]
        assert any(set("abcd") <= set(each) for each in sent)
        assert not any(other.is_over for other in others)

    run(test)


@pytest.mark.parametrize("num_cores", [2, 3, 5])
def test_poison_fails_alone_and_the_other_cores_serve_all_others_without_restart(num_cores):
    """The poison kills each core in the first step with it; other requests get a token in each step."""

    def test():
        engine = Engine(num_cores)
        poison = engine.add("poison", rank=0)
        others = [engine.add(f"r{i}") for i in range(12)]
        died = []
        while not poison.is_over:
            rank = next(client.rank for client in engine.group.clients if poison in client.requests)
            died.append(rank)
            client = engine.group.client(rank)
            own = [stream for stream in client.requests.streams() if client._suspects.is_suspect(stream)]
            step = own[:1] if poison in own[:1] else [poison] if own else client.requests.streams()
            engine.die(rank, *step)
            for other in engine.group.clients:
                if other.has_core:
                    for stream in other.requests.streams():
                        if stream is not poison:
                            engine.give_token(other.rank, stream, position=stream.awaited[0].num_tokens)
            for stream in engine.requests.streams():
                client = next(client for client in engine.group.clients if stream in client.requests)
                if num_cores > 2 and len(died) < 3:
                    assert client.has_core or stream is poison or client._suspects.is_suspect(stream)
            engine.rejoin(rank)
            assert len(died) <= 4
        assert "was in the step of each of" in str(poison.error)
        assert len(set(died)) == 2, "only two cores die of it"
        assert not any(stream.is_over for stream in others)
        assert sorted(engine.cores[died[-1]].forgiven) == sorted(engine.cores[died[0]].forgiven)
        with pytest.raises(EngineError, match="is refused"):
            engine.add("again", ids=[ord(letter) for letter in "poison"])

    run(test)


@pytest.mark.parametrize(("max_restarts", "num_deaths"), [(0, 2), (1, 3)])
def test_poison_ends_a_bounded_number_of_cores_for_good(max_restarts, num_deaths):
    """As above, with cores that are gone for good after few deaths."""

    def test():
        engine = Engine(4)
        poison = engine.add("poison", rank=0)
        others = [engine.add(f"r{i}") for i in range(20)]
        left = dict.fromkeys(range(4), max_restarts)
        died = []
        while not poison.is_over:
            rank = next(client.rank for client in engine.group.clients if poison in client.requests)
            client = engine.group.client(rank)
            groups = {client._suspects.isolation(stream.awaited[0]).group for stream in client.requests.streams()}
            group = client._suspects.isolation(poison.awaited[0]).group
            assert group or groups == {0}
            step = [s for s in client.requests.streams() if client._suspects.isolation(s.awaited[0]).group == group]
            left[rank] -= 1
            died.append(rank)
            engine.die(rank, *step, left=left[rank])
            if left[rank] >= 0:
                engine.rejoin(rank)
        assert len(died) == num_deaths
        assert sum(count < 0 for count in left.values()) <= 2
        assert isinstance(poison.error, EngineGenerateError)
        assert "alone in the last" in str(poison.error)
        assert not any(stream.is_over for stream in others)
        lasting = [client for client in engine.group.clients if client.dead_error is None]
        assert {s for client in lasting for s in client.requests.streams()} == set(others)

    run(test)


OLD, NEW = (wire.ModelDigest(weights, "config", "tokenizer") for weights in ("old", "new"))


def engine_with_a_core_left_out():
    """Return an engine whose second core came back with other weights than the first one has."""
    engine = Engine()
    for rank in (0, 1):
        engine.cores[rank].model = OLD
        engine.die(rank)
        engine.rejoin(rank)
    engine.die(1)
    engine.cores[1].model = NEW
    engine.rejoin(1)
    return engine


def test_core_that_comes_back_with_other_weights_gets_no_requests_while_another_core_has_the_former(caplog):
    def test():
        engine = engine_with_a_core_left_out()
        assert engine.group.why_left_out(1) == "other weights"
        assert caplog.text.count("the core with rank 1 differs from the other cores (other weights)") == 1
        for name in "abc":
            engine.add(name, rank=1)
        assert (names(engine.sent(0)), engine.sent(1)) == (["a", "b", "c"], [])
        assert engine.group.num_serving == 1
        engine.die(0)
        assert engine.sent(1) == []
        engine.rejoin(0)
        assert names(engine.sent(0)) == ["a", "b", "c"]

    run(test)


def test_engine_goes_on_with_other_weights_once_no_core_has_the_former_ones():
    def test():
        engine = engine_with_a_core_left_out()
        begun, waiting = engine.add("a"), engine.add("b")
        engine.give_token(0, begun)
        engine.die(0)
        engine.cores[0].model = NEW
        engine.rejoin(0)
        assert "has other weights" in str(begun.error)
        assert waiting.error is None
        assert engine.group.why_left_out(0) is engine.group.why_left_out(1) is None
        engine.add("c", rank=0)
        engine.add("d", rank=1)
        assert [names(engine.sent(rank)) for rank in (0, 1)] == [["b", "c"], ["d"]]

    run(test)


def test_core_with_other_weights_serves_once_the_core_with_the_former_ones_is_missed_for_too_long():
    def test():
        engine = engine_with_a_core_left_out()
        engine.die(0)
        waiting = engine.add("a")
        assert engine.sent(1) == []
        engine.group.client(0)._on_absence(Absence("no core answers there", 60.0))
        assert names(engine.sent(1)) == ["a"]
        assert waiting.error is None
        engine.rejoin(0)
        assert engine.group.why_left_out(0) == "other weights"
        engine.cores[0].model = NEW
        engine.die(0)
        engine.rejoin(0)
        assert engine.group.why_left_out(0) is None

    run(test)


def test_requests_move_to_other_weights_if_the_last_core_with_the_former_ones_is_gone_for_good():
    def test():
        engine = engine_with_a_core_left_out()
        begun, waiting = engine.add("a"), engine.add("b")
        engine.give_token(0, begun)
        engine.die(0, left=-1)
        assert "has other weights" in str(begun.error)
        assert waiting.error is None
        assert names(engine.sent(1)) == ["b"]

    run(test)


def test_requests_that_wait_for_a_core_go_on_with_others_if_it_comes_back_with_other_weights():
    def test():
        engine = engine_with_a_core_left_out()
        engine.die(1)
        engine.cores[1].model = OLD
        engine.rejoin(1)
        stream = engine.add("a", rank=1)
        engine.give_token(1, stream)
        for core in engine.cores:
            core.on_message(wire.PauseChanged(0, True))
        engine.die(1, outside=True)
        assert engine.sent(0) == []
        engine.cores[1].model = NEW
        engine.rejoin(1)
        assert names(engine.sent(0)) == ["a"]
        assert engine.sent(1) == []
        engine.give_token(0, stream, position=1)
        assert list(stream.completions[0].token_ids) == [5, 5]

    run(test)


def test_cores_that_load_other_weights_one_after_the_other_are_all_in_use_again():
    def test():
        engine = engine_with_a_core_left_out()
        for rank, model in ((0, wire.NO_DIGEST), (1, wire.NO_DIGEST), (1, NEW), (0, NEW)):
            engine.cores[rank].on_message(wire.ModelChanged(engine.cores[rank].num_deaths, model))
        for name in "ab":
            engine.add(name)
        assert [len(engine.sent(rank)) for rank in (0, 1)] == [1, 1]

    run(test)


def test_core_of_another_model_is_not_added():
    def test():
        engine = engine_with_a_core_left_out()
        added = StandInSupervisor()
        added.model = NEW
        with pytest.raises(EngineStartError, match="have different models: other weights; add a core of the same"):
            engine.group.check_model(added.start())
        added.model = OLD
        engine.group.check_model(added.start())

    run(test)


def test_requests_of_a_core_that_is_gone_do_not_move_before_its_last_news_is_handled():
    def test():
        engine = Engine(3)
        stream = engine.add("a", rank=0)
        core = engine.cores[0]
        core.end, core.has_news = "it died too often", True
        engine.die(2, outside=True)
        assert engine.sent(1) == [], "it is not known yet whether the request was in the step"
        core.has_news = False
        engine.die(0, stream, left=-1)
        assert engine.sent(1) == [("a", 1)], "it runs isolated"

    run(test)


def test_signal_from_outside_that_ends_a_core_for_good_makes_no_suspects():
    def test():
        engine = Engine()
        streams = [engine.add(name, rank=0) for name in "ab"]
        engine.die(0, *streams, outside=True, left=-1)
        assert sorted(engine.sent(1)) == [("a", 0), ("b", 0)]

    run(test)


def test_new_requests_avoid_a_core_that_tests_suspects():
    def test():
        engine = Engine()
        suspects = [engine.add(name, rank=0) for name in "ab"]
        engine.die(0, *suspects)
        engine.rejoin(0)
        engine.die(1, *suspects)
        assert engine.sent(0) == [], "suspects stay for the next core"
        engine.rejoin(1)
        assert sorted(group for _, group in engine.sent(1)) == [1, 2]
        for name in "cdef":
            engine.add(name)
        assert len(engine.sent(0)) == 4
        for stream in suspects:
            engine.give_token(1, stream)
        engine.add("g")
        assert names(engine.sent(1)) == ["g"]

    run(test)


def test_live_requests_are_not_searched_for_suspects_after_a_single_death(monkeypatch):
    def test():
        engine = Engine()
        exposed = [engine.add(name, rank=0) for name in "ab"]
        engine.die(0, *exposed)
        engine.rejoin(0)
        num_searches = 0

        def streams(client):
            nonlocal num_searches
            num_searches += 1
            return list(client._streams)

        monkeypatch.setattr(OutputProcessor, "streams", streams)
        engine.add("c")
        assert num_searches == 0
        engine.die(1, *exposed)
        engine.rejoin(1)
        num_searches = 0
        engine.add("d")
        assert num_searches > 0, "now there are suspects"

    run(test)


def test_death_of_a_shared_core_counts_for_its_requests_wherever_they_are():
    def test():
        engine = Engine(is_shared=True)
        stream = engine.add("a", rank=0)
        engine.die(0, stream)
        assert names(engine.sent(1)) == ["a"]
        engine.rejoin(0)
        engine.die(1, stream)
        assert names(engine.sent(0)) == ["a"], "it is not known yet that the request was in the step"
        engine.rejoin(1)
        assert "was in the step of each of 2 cores" in str(stream.error)

    run(test)


def test_request_that_another_core_got_beyond_the_step_is_not_blamed_for_a_shared_core():
    def test():
        engine = Engine(is_shared=True)
        stream = engine.add("a", rank=0)
        for _ in range(6):
            engine.die(0, stream)
            engine.give_token(1, stream, position=stream.awaited[0].num_tokens)
            engine.rejoin(0)
            engine.group.client(1).hand_over([stream], engine.group.client(0))
        assert not stream.is_over

    run(test)


def test_engine_goes_on_without_a_core_that_is_gone_for_good_and_fails_with_the_last():
    def test():
        engine = Engine()
        stream = engine.add("a", rank=0)
        engine.die(0, left=-1)
        assert names(engine.sent(1)) == ["a"]
        assert engine.group.dead_error is None
        engine.add("b", rank=0)
        assert names(engine.sent(1)) == ["b"], "a pinned request goes to another core"
        engine.die(1, left=-1)
        assert isinstance(stream.error, EngineDeadError)
        with pytest.raises(EngineDeadError, match="too often"):
            engine.group.attach()

    run(test)


def test_requests_of_a_core_that_ends_during_the_shutdown_fail_with_all_others(monkeypatch):
    def test():
        engine = Engine()
        streams = [engine.add("a", rank=0), engine.add("b", rank=1)]
        first = engine.group.client(0)
        fail_first = first.fail_all

        def fail_first_and_end_second(error):
            fail_first(error)
            engine.die(1, left=-1)

        monkeypatch.setattr(first, "fail_all", fail_first_and_end_second)
        engine.group.fail_all(EngineDeadError("the engine was shut down"))
        assert all(isinstance(stream.error, EngineDeadError) for stream in streams)

    run(test)


def test_requests_of_a_core_that_ends_for_good_wait_for_a_core_that_restarts():
    def test():
        engine = Engine()
        stream = engine.add("a", rank=0)
        engine.die(1, outside=True)
        engine.die(0, left=-1)
        engine.rejoin(1)
        assert names(engine.sent(1)) == ["a"]
        assert not stream.is_over

    run(test)


def test_paused_requests_stay_for_the_next_core():
    def test():
        engine = Engine()
        engine.add("a", rank=0)
        for core in engine.cores:
            core.on_message(wire.PauseChanged(0, True))
        engine.die(0, outside=True)
        assert engine.sent(1) == []
        engine.rejoin(0)
        assert names(engine.sent(0)) == ["a"]

    run(test)


def test_drained_core_gets_no_requests_until_it_is_resumed_and_its_requests_stay():
    def test():
        engine = Engine()
        engine.add("a", rank=0)
        engine.group.drain(0)
        for name in "bc":
            engine.add(name, rank=0)
        assert names(engine.sent(0)) == ["a"]
        assert names(engine.sent(1)) == ["b", "c"]
        engine.group.resume(0)
        engine.add("d")
        assert names(engine.sent(0)) == ["d"]

    run(test)


def test_requests_of_a_core_that_is_removed_go_on_with_others():
    def test():
        engine = Engine()
        stream = engine.add("a", rank=0)
        engine.give_token(0, stream)
        assert engine.group.remove(0) is engine.cores[0]
        assert names(engine.sent(1)) == ["a"]
        engine.give_token(1, stream, position=1)
        assert list(stream.completions[0].token_ids) == [5, 5]
        with pytest.raises(ValueError, match="rank=1: no other core could go on"):
            engine.group.remove(1)
        with pytest.raises(ValueError, match="rank=0: there is no such core; the ranks are 1"):
            engine.group.drain(0)
        added = StandInSupervisor()
        engine.group.add_core(added, engine.group.reserve_rank())
        engine.cores.append(added)
        assert [client.rank for client in engine.group.clients] == [1, 2]
        engine.add("b")
        assert names(engine.sent(2)) == ["b"]

    run(test)


def test_aborted_request_frees_its_slot_wherever_it_runs():
    def test():
        engine = Engine()
        stream = engine.add("a", rank=0)
        engine.die(0, stream, outside=True)
        engine.sent(1)
        engine.group.abort("a")
        (abort,) = engine.cores[1].sent
        assert abort == wire.AbortRequests(0, [stream.awaited[0].slot])
        assert engine.requests.num_slots_in_use == 1
        ends = [wire.Finished(abort.slots[0], 0, "abort")]
        engine.cores[1].on_message(wire.StepOutput(0, 1, b"", b"", b"", finished=ends))
        assert engine.requests.num_slots_in_use == 0
        assert not engine.group._placements

    run(test)


def test_call_is_made_in_every_core_that_serves_and_kept_for_those_that_are_away():
    async def test():
        engine = Engine(3)
        engine.group.attach()
        for core in engine.cores:
            core.answers = {"pause": {}, "status": {"result": 7}}
        engine.die(1, outside=True)
        assert await engine.group.call("status", 5.0) == [7, 7]
        await engine.group.call("pause", 5.0, "keep", True)
        assert engine.cores[1].sent == []
        engine.rejoin(1)
        assert [m.name for m in engine.cores[1].sent if isinstance(m, wire.Call)] == ["pause"]

    run(test)


def test_error_of_one_core_is_raised_after_all_have_answered():
    async def test():
        engine = Engine()
        engine.group.attach()
        engine.cores[0].answers = {"add_lora": {"error": "no room"}}
        engine.cores[1].answers = {"add_lora": {"result": True}}
        with pytest.raises(EngineError, match="no room"):
            await engine.group.call("add_lora", 5.0, "name")

    run(test)


def test_calls_about_adapters_that_a_core_misses_while_it_starts_are_kept_in_order():
    async def test():
        engine = Engine(1)
        engine.group.attach()
        under_way = asyncio.create_task(engine.group.call("add_lora", 5.0, "a", 1, "/a", False))
        await asyncio.sleep(0)
        (sent,) = engine.cores[0].sent
        engine.cores[0].answers = {"remove_lora": {"result": True}, "pin_lora": {"error": "no adapter"}, "ping": {}}
        with engine.group.adapter_calls.missed() as missed:
            await engine.group.call("remove_lora", 5.0, 1)
            await engine.group.call("ping", 5.0)
            with pytest.raises(EngineError, match="no adapter"):
                await engine.group.call("pin_lora", 5.0, 1)
        await engine.group.call("remove_lora", 5.0, 2)
        add, remove, pin = missed
        assert (add.name, add.args, add.has_effect.done()) == ("add_lora", ("a", 1, "/a", False), False)
        assert (remove.name, remove.args, remove.has_effect.result()) == ("remove_lora", (1,), True)
        assert (pin.name, pin.has_effect.result()) == ("pin_lora", False)
        engine.cores[0].on_message(wire.Reply(0, sent.call_id, result=True))
        assert await under_way == [True]
        assert add.has_effect.result()

    run(test)


def test_engine_is_healthy_while_one_core_answers():
    async def test():
        engine = Engine()
        engine.group.attach()
        engine.cores[0].answers = {"ping": {"error": "broken"}}
        with pytest.raises(EngineError):
            await engine.group.ping(0.01)
        engine.cores[1].answers = {"ping": {}}
        await engine.group.ping(5.0)
        engine.die(1, outside=True)
        assert engine.group.recovers_from is None
        engine.die(0, outside=True)
        assert engine.group.recovers_from == "it died; log"

    run(test)
