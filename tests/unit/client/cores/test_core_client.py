"""What a client sends to the next core after a death, and which requests it fails or refuses."""

import asyncio

import pytest
from support.stand_in_core import StandInSupervisor

from vllm_mp import EngineGenerateError, PoolingParams, SamplingParams, wire
from vllm_mp.client.cores.core_group import CoreGroup
from vllm_mp.client.cores.recovery import refused_requests, waiting_replays
from vllm_mp.client.cores.recovery.news import Death
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.outputs.pooling_stream import PoolingStream
from vllm_mp.client.outputs.stream import GenerationStream
from vllm_mp.client.prompts.request import GenerationRequest, PoolingRequest
from vllm_mp.client.stats import EngineStats
from vllm_mp.errors import NoRoomError, RequestInterruptedError
from vllm_mp.testing.engines import eventually


class Cores(StandInSupervisor):
    """The cores of a client, one after the other, and the client."""

    def __init__(self, is_shared=False):
        super().__init__(is_shared)
        self.client = CoreGroup([self], LiveRequests(), EngineStats(64, False)).first

    def add(self, name, prompt=None, seed=None, salt="", **options):
        params = SamplingParams(seed=seed or 1)
        ids = prompt or [ord(letter) for letter in name]
        request = GenerationRequest(
            name, "", ids, wire.pack_ids(ids), params, 0.0, cache_salt=salt, seed_is_drawn=seed is None, **options
        )
        stream = GenerationStream(request, [Completion(0, params)])
        self.client.add(stream)
        return stream

    def die(self, *slots, is_step_known=True, aborted=(), loaded=None):
        """Let the core die with `slots` in its step, and replay to the next core; return the slots that it is sent.

        The ids `aborted` are aborted in between. `loaded` is what the core has loaded last, if it could not tell.
        """
        self.num_deaths += 1
        loaded = self.core.digest if loaded is None else loaded
        death = Death("it died; log", dict.fromkeys(slots, 0), len(slots), False, time=float(self.num_deaths))
        last = wire.LastDeath(
            self.num_deaths - 1, "it died", "signal", False, len(slots), [(slot, 0) for slot in slots], model=loaded
        )
        if self.is_shared:  # only the successor knows more
            death = death._replace(in_step={}, num_in_step=0, is_from_outside=True)
        self.client._on_death(death._replace(is_step_known=is_step_known and not self.is_shared))
        for name in aborted:
            self.client.abort(name)
        self.sent.clear()
        self.core = self.start(last if is_step_known else None)
        self.client._replay_to(self.core)
        return self.sent_slots()

    def sent_slots(self):
        """Return the slots of the requests that were sent since the last call, with their groups."""
        slots = [(m.slot, m.isolation_group) for m in self.sent if isinstance(m, wire.AddRequest)]
        self.sent.clear()
        return slots

    def give_token(self, slot, position=0):
        columns = (bytes([slot, 0]), bytes([5, 0, 0, 0]), bytes([position, 0]))
        self.on_message(wire.StepOutput(self.num_deaths, 1, *columns))


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def cores(request):
    return Cores(is_shared=request.param)


def test_suspects_are_sent_with_their_groups(cores):
    for name in "abc":
        cores.add(name)
    assert cores.die(0, 1, 2) == [(0, 0), (1, 0), (2, 0)]
    assert cores.die(0, 1, 2) == [(0, 1), (1, 1), (2, 2)]


def test_requests_equal_to_the_culprit_fail_with_it_and_their_deaths_are_forgiven(cores):
    culprit, copy = cores.add("a", [1, 2]), cores.add("b", [1, 2])
    others = [cores.add("c", [1, 2, 3]), cores.add("d", [1, 2], seed=1), cores.add("e", [1, 2], salt="tenant")]
    cores.die(0, 1, 2)
    cores.die(0, 1, 2)
    assert [slot for slot, _ in cores.die(0)] == [2, 3, 4]
    assert "in the step of each of 3 cores that died, alone in the last (it died; it died): it died" in (
        str(culprit.error)
    )
    assert "equal to request a, of which is known: it was in the step of each of 3 cores" in str(copy.error)
    assert not any(other.is_over for other in others)
    assert cores.forgiven == ([] if cores.is_shared else [1.0, 2.0, 3.0]), "the parent of a shared core forgives"
    assert cores.client.requests.num_slots_in_use == 3


def test_next_cores_of_a_parent_hear_of_which_deaths_a_request_is_to_blame():
    cores = Cores(is_shared=True)
    cores.add("a")
    cores.sent_slots = lambda: [message for message in cores.sent if isinstance(message, wire.Convicted)]
    told = wire.Convicted(2, [0, 1]), wire.Convicted(3, [0, 1])
    assert [cores.die(0) for _ in range(3)] == [[], [told[0]], [told[1]]]


def test_deaths_are_not_forgiven_if_every_request_ends_every_core():
    cores = Cores()
    for name in "abc":
        cores.add(name)
        for _ in range(2):
            cores.die(0)
    assert cores.forgiven == [1.0, 2.0], "until it is known that no core works"
    cores.add("d")
    cores.give_token(0)
    cores.add("e")
    for _ in range(2):
        cores.die(1)
    assert cores.forgiven == [1.0, 2.0, 7.0, 8.0]


def test_request_equal_to_a_culprit_is_refused_for_a_while(cores, monkeypatch):
    cores.add("a", [1, 2])
    for _ in range(2):
        cores.die(0)
    with pytest.raises(EngineGenerateError, match="request b is refused: it is equal to request a, which failed"):
        cores.add("b", [1, 2])
    cores.add("c", [1, 3])
    assert cores.sent_slots() == [(0, 0)]
    monkeypatch.setattr(refused_requests, "_REFUSAL_S", 0.0)
    cores.add("d", [1, 2])
    assert cores.sent_slots() == [(1, 0)]


def test_number_of_refused_requests_is_bounded(cores, monkeypatch):
    monkeypatch.setattr(refused_requests, "_MAX_REFUSED", 2)
    for name in "abc":
        cores.add(name, [ord(name)])
        for _ in range(2):
            cores.die(0)
    cores.add("again", [ord("a")])
    for name in "bc":
        with pytest.raises(EngineGenerateError):
            cores.add("again", [ord(name)])


def test_requests_are_held_back_while_a_group_is_tested_if_the_steps_are_unknown(cores):
    for name in "abc":
        cores.add(name)
    for _ in range(2):
        assert [slot for slot, _ in cores.die(is_step_known=False)] == [0, 1, 2]
    assert [slot for slot, _ in cores.die(is_step_known=False)] == [0, 1]
    cores.add("later")
    cores.give_token(0)
    assert cores.sent_slots() == []
    cores.give_token(1)
    assert [slot for slot, _ in cores.sent_slots()] == [2], "the group is cleared, and the next group is tested"
    cores.give_token(2)
    assert cores.sent_slots() == [(3, 0)]


def test_request_that_is_held_back_can_be_aborted(cores):
    for name in "ab":
        cores.add(name)
    for _ in range(3):
        cores.die(is_step_known=False)
    cores.client.abort("b")
    assert cores.sent == [], "the core does not know the request"
    assert cores.client.requests.num_slots_in_use == 1
    cores.give_token(0)
    assert cores.sent_slots() == []


def test_request_without_progress_fails_after_five_deaths_in_unknown_steps_and_an_innocent_request_completes(cores):
    culprit, innocent = cores.add("a"), cores.add("b")
    for _ in range(3):
        cores.die(is_step_known=False)
    assert [slot for slot, _ in cores.die(is_step_known=False)] == [1], "the other half has its turn"
    cores.give_token(1)
    assert [slot for slot, _ in cores.sent_slots()] == [0]
    assert [slot for slot, _ in cores.die(is_step_known=False)] == [1]
    assert "it was live in each of 5 cores that died, alone in the last" in str(culprit.error)
    assert not innocent.is_over


def test_no_request_is_held_back_for_a_group_that_was_aborted_while_there_was_no_core(cores):
    for name in "ab":
        cores.add(name)
    for _ in range(3):
        cores.die(is_step_known=False)
    assert cores.die(is_step_known=False, aborted="b") == [(0, 3)], "it is the turn of b, which has ended"


def test_no_request_is_held_back_for_a_group_that_failed_as_equal_to_the_culprit(cores):
    culprit, copy, innocent = cores.add("a", [1, 2]), cores.add("b", [1, 2]), cores.add("c")
    for _ in range(4):
        cores.die(is_step_known=False)
    cores.give_token(2)
    assert [slot for slot, _ in cores.sent_slots()] == [0]
    assert cores.die(is_step_known=False) == [(2, 0)]
    assert culprit.is_over
    assert copy.is_over
    assert not innocent.is_over


def test_messages_of_requests_that_stay_held_back_are_not_built_at_each_step(cores, monkeypatch):
    for name in "abc":
        cores.add(name)
    for _ in range(3):
        cores.die(is_step_known=False)
    monkeypatch.setattr(GenerationStream, "add_message", lambda *_: pytest.fail("a message is built"))
    cores.give_token(0)


def refuse(cores, *slots):
    """Let the core refuse the requests in `slots` for lack of room."""
    ends = [wire.Finished(slot, 0, "error", error="no room", no_room=True) for slot in slots]
    cores.on_message(wire.StepOutput(cores.num_deaths, 0, b"", b"", b"", finished=ends))


def end(cores, slot, num_tokens=0):
    ends = [wire.Finished(slot, num_tokens, "length")]
    cores.on_message(wire.StepOutput(cores.num_deaths, 1, b"", b"", b"", finished=ends))


def test_new_request_that_the_core_refuses_fails():
    cores = Cores()
    cores.client._listen()
    stream = cores.add("a")
    refuse(cores, 0)
    assert isinstance(stream.error, NoRoomError)
    assert cores.client.requests.num_slots_in_use == 0


def test_replay_that_the_core_refuses_is_sent_again_when_another_request_has_ended(cores, monkeypatch):
    monkeypatch.setattr(waiting_replays, "_REST_S", 0.0)
    streams = [cores.add(name) for name in "abc"]
    vector = PoolingStream(PoolingRequest("d", "", [5], wire.pack_ids([5]), PoolingParams(), 0.0))
    cores.client.add(vector)
    cores.die(0)
    refuse(cores, 1, 2, 3)
    assert not any(stream.is_over or stream.has_news() for stream in (*streams, vector))
    assert cores.sent == []
    end(cores, 0)
    assert [message.slot for message in cores.sent] == [1], "after a refusal, one is sent"
    assert cores.sent[0].is_replay
    cores.give_token(1)
    end(cores, 1, num_tokens=1)
    assert [message.slot for message in cores.sent] == [1, 2, 3]
    assert isinstance(cores.sent[2], wire.AddPooling)
    cores.give_token(2)
    assert [len(stream.completions[0].token_ids) for stream in streams] == [0, 1, 1]


def test_new_requests_wait_until_the_core_has_begun_each_replay_that_it_had_no_room_for(cores, monkeypatch):
    monkeypatch.setattr(waiting_replays, "_REST_S", 0.0)
    for name in "abc":
        cores.add(name)
    cores.die()
    refuse(cores, 1)
    new = [cores.add(name) for name in "de"]
    assert cores.sent_slots() == []
    end(cores, 0)
    assert cores.sent_slots() == [(1, 0)], "the replay is sent before new requests"
    cores.give_token(2)
    assert cores.sent_slots() == [], "it is not known whether there was room"
    refuse(cores, 1)
    end(cores, 2, num_tokens=1)
    assert cores.sent_slots() == [(1, 0)]
    cores.give_token(1)
    assert [slot for slot, _ in cores.sent_slots()] == [stream.awaited[0].slot for stream in new]
    assert not any(stream.is_replay for stream in new)


def test_new_requests_of_other_tenants_or_of_a_higher_priority_do_not_wait_for_a_replay(cores):
    for name, priority in (("a", 3), ("b", 5), ("c", 9)):
        cores.add(name, tenant=1, priority=priority)
    cores.die()
    refuse(cores, 0, 1)
    for name, tenant, priority in (("d", 1, 2), ("e", 2, 3), ("f", 0, 9)):
        cores.add(name, tenant=tenant, priority=priority)
    assert [slot for slot, _ in cores.sent_slots()] == [3, 4, 5]
    for name, priority in (("g", 3), ("h", 4), ("i", 5)):
        cores.add(name, tenant=1, priority=priority)
    assert cores.sent_slots() == []
    cores.give_token(0)
    assert [slot for slot, _ in cores.sent_slots()] == [6, 7], "b still waits, before i"


def test_new_requests_of_all_tenants_wait_for_a_replay_that_is_larger_than_the_share_of_its_tenant(cores):
    for name, tenant in (("a", 1), ("b", 2)):
        cores.add(name, tenant=tenant, priority=3)
    cores.die()
    refuse(cores, 0)
    for name, tenant, priority in (("c", 1, 3), ("d", 2, 3), ("e", 2, 4), ("f", 2, 2)):
        cores.add(name, tenant=tenant, priority=priority)
    assert [slot for slot, _ in cores.sent_slots()] == [5], "the priority of f is higher"
    cores.give_token(0)
    assert [slot for slot, _ in cores.sent_slots()] == [2, 3, 4]
    cores.add("g", tenant=2, priority=3)
    assert [slot for slot, _ in cores.sent_slots()] == [6]


@pytest.mark.parametrize("leaves", ["the replay", "the new request", "the core"])
def test_new_request_that_waits_for_a_replay_is_not_forgotten(cores, leaves):
    for name in "ab":
        cores.add(name)
    cores.die()
    refuse(cores, 1)
    new = cores.add("c")
    if leaves == "the replay":
        cores.client.abort("b")
        assert cores.sent_slots() == [(2, 0)]
    elif leaves == "the new request":
        cores.client.abort("c")
        assert cores.sent == []
        assert cores.client.requests.num_slots_in_use == 2
    else:
        assert cores.die() == [(0, 0), (1, 0), (2, 0)]
    assert new.is_over == (leaves == "the new request")


def test_replay_that_waits_for_room_can_be_aborted(cores):
    for name in "ab":
        cores.add(name)
    cores.die()
    refuse(cores, 1)
    cores.client.abort("b")
    assert cores.sent == [], "the core does not know the request"
    assert cores.client.requests.num_slots_in_use == 1
    end(cores, 0)
    assert cores.sent == []


def test_replay_that_waits_for_room_is_sent_to_the_next_core_and_is_not_to_blame_for_the_death(cores):
    for name in "ab":
        cores.add(name)
    for position in range(8):
        cores.die(is_step_known=False)
        refuse(cores, 1)
        cores.give_token(0, position)
    assert [slot for slot, _ in cores.die(is_step_known=False)] == [0, 1]
    assert cores.client.requests.num_slots_in_use == 2


def test_replay_that_the_core_refuses_is_sent_again_after_a_while(monkeypatch):
    monkeypatch.setattr(waiting_replays, "_REST_S", 0.0)
    monkeypatch.setattr(waiting_replays, "_RETRY_S", 0.01)

    async def run():
        cores = Cores()

        async def is_sent():
            return cores.sent_slots()

        stream = cores.add("a")
        cores.die()
        for _ in range(3):
            refuse(cores, 0)
            await eventually(is_sent)
        cores.give_token(0)
        assert (await stream.next()).outputs[0].token_ids == [5]

    asyncio.run(run())


def shared_core(cores, incarnation, last_death=None, why_dropped=""):
    """Return a core of another process."""
    welcome = wire.welcome(incarnation, 0, 1, b"", last_death=last_death, why_dropped=why_dropped)
    return cores.core_of(welcome)


def lose_connection(cores):
    cores.num_deaths += 1
    cores.client._on_death(Death("it broke", {}, 0, True, time=float(cores.num_deaths), is_step_known=False))


def join(cores, core):
    """Let the client replay to `core`; return the slots that it is sent."""
    cores.sent.clear()
    cores.client._replay_to(core)
    return cores.sent_slots()


def test_death_of_an_earlier_core_is_not_counted_again():
    cores = Cores(is_shared=True)
    stream = cores.add("a", [1, 2])
    death = wire.LastDeath(10, "signal SIGSEGV", "signal", False, num_in_step=1, in_step=[(0, 0)])
    join(cores, shared_core(cores, 10))
    lose_connection(cores)
    join(cores, shared_core(cores, 11, death))
    for _ in range(40):  # the connection breaks, and core 11 lives
        lose_connection(cores)
        assert join(cores, shared_core(cores, 11, death)) == [(0, 0)]
    assert not stream.is_over


def test_reason_for_which_the_core_dropped_the_client_is_logged(caplog):
    cores = Cores(is_shared=True)
    join(cores, shared_core(cores, 10))
    lose_connection(cores)
    join(cores, shared_core(cores, 10, why_dropped="it had not read 5 bytes"))
    assert "dropped this client: it had not read 5 bytes" in caplog.text


def test_next_core_with_other_weights_continues_no_request_that_has_tokens():
    cores = Cores()
    cores.model = wire.ModelDigest("weights", "config", "tokenizer")
    cores.die()
    begun, waiting = cores.add("a"), cores.add("b")
    cores.give_token(0)
    cores.model = wire.ModelDigest("other weights", "config", "tokenizer")
    assert cores.die() == [(1, 0)]
    assert str(begun.error) == (
        "request a: the model's files have changed since it began, and the core that is to continue it has other "
        "weights; send it again"
    )
    assert isinstance(begun.error, RequestInterruptedError)
    assert waiting.error is None
    cores.add("c")
    assert cores.sent_slots() == [(0, 0)], "new requests are served"


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("woke_up", [True, False])
def test_core_after_a_sleep_without_weights_continues_all_requests_with_others(cores, woke_up, is_told):
    cores.model = wire.ModelDigest("weights", "config", "tokenizer")
    cores.die()
    begun = cores.add("a")
    cores.give_token(0)
    cores.model = wire.ModelDigest("other weights", "config", "tokenizer")
    loaded = [wire.NO_DIGEST, cores.model] if woke_up else [wire.NO_DIGEST]
    if is_told:
        for model in loaded:
            cores.on_message(wire.ModelChanged(1, model))
    assert cores.die(loaded=loaded[-1]) == [(0, 0)]
    assert begun.error is None


def test_core_that_read_other_weights_while_the_connection_was_broken_continues_all_requests():
    cores = Cores(is_shared=True)
    cores.model = wire.ModelDigest("weights", "config", "tokenizer")
    join(cores, cores.core_of(wire.welcome(10, 0, 1, b"", model=cores.model)))
    begun = cores.add("a")
    cores.on_message(wire.StepOutput(10, 1, b"\0\0", b"\5\0\0\0", b"\0\0"))
    lose_connection(cores)
    cores.model = wire.ModelDigest("other weights", "config", "tokenizer")
    assert join(cores, cores.core_of(wire.welcome(10, 0, 1, b"", model=cores.model))) == [(0, 0)]
    assert begun.completions[0].token_ids
    assert begun.error is None


def test_next_core_with_another_chat_template_continues_all_requests():
    cores = Cores()
    cores.model = wire.ModelDigest("weights", "config", "tokenizer")
    cores.die()
    begun = cores.add("a")
    cores.give_token(0)
    cores.model = wire.ModelDigest("weights", "config", "other tokenizer")
    assert len(cores.die()) == 1
    assert begun.error is None


def test_requests_after_a_death_are_marked_as_the_next_core_is_paused(cores):
    for is_paused in (True, False):
        cores.is_paused = is_paused
        cores.die()
        cores.add(f"paused: {is_paused}")
        (message,) = cores.sent
        assert message.after_pause == is_paused


def test_time_without_a_core_does_not_count_against_a_call_that_awaits_the_successor():
    async def run():
        cores = Cores()
        cores.client.attach()
        patient = asyncio.create_task(cores.client.call("resume", 0.05, awaits_successor=True))
        await asyncio.sleep(0)
        cores.client._on_death(Death("it died; log", {}, 0, False, time=1.0))
        late = asyncio.create_task(cores.client.call("resume", 0.05, awaits_successor=True))
        with pytest.raises(TimeoutError):
            await cores.client.call("resume", 0.2)
        assert not patient.done()
        assert not late.done()
        cores.answers["resume"] = {"result": 5}
        cores.num_deaths += 1
        cores.core = cores.start(None)
        cores.client._replay_to(cores.core)
        assert await asyncio.gather(patient, late) == [5, 5]

    asyncio.run(run())
