"""The pause, the sleep and the turns of a core that several clients share, also after its death."""

import asyncio
import os
import signal

import pytest
from support.engine_fixtures import SLOW_STEPS

from vllm_mp import AsyncLLM, EngineError, NotOperatorError, SamplingParams, wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.keys.operator_key import ensure_operator_key
from vllm_mp.testing.engines import answer, eventually, greedy, is_empty, num_waiting_is, rest, standalone_core
from vllm_mp.testing.random_models import CONFIGS, save_config

pytestmark = pytest.mark.usefixtures("forked_programs")

PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}
FLAGS = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "128", "--kv-cache-memory-bytes"),
    *(str(2**22), "--max-num-seqs", "4", "--num-threads", "1", "--max-core-restarts", "1000", "--check-invariants"),
    *("--fault-injection", SLOW_STEPS),
)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Yield (address, operator key file) of a core, which is started again when it dies."""
    folder = tmp_path_factory.mktemp("core")
    address, key_file = f"ipc://{folder}/core.sock", str(folder / "operators")
    ensure_operator_key(key_file)
    (folder / "model").mkdir()
    model = save_config(CONFIGS["llama"], folder / "model")
    with standalone_core(model, address, "--operator-key-file", key_file, *FLAGS):
        yield address, key_file


@pytest.fixture
def connect(core):
    """A function that connects an operator, or with `connect(False)` a plain client."""
    address, key_file = core
    clients = []

    def connect(is_operator=True):
        clients.append(AsyncLLM.connect(address, operator_key_file=key_file if is_operator else None))
        return clients[-1]

    yield connect

    async def clean():
        await clients[-1].wake_up()
        await clients[-1].resume_generation()
        await eventually(lambda: is_empty(clients[-1]))

    for client in clients:
        client.shutdown()
    connect()
    asyncio.run(clean())
    clients[-1].shutdown()


async def kill(*clients):
    """Kill the core; return when its successor serves `clients`."""
    incarnation = (await clients[0].core_status())["incarnation"]
    os.kill((await clients[0].core_status())["pid"], signal.SIGKILL)
    for client in clients:

        async def has_successor(client=client):
            return (await client.core_status())["incarnation"] > incarnation

        await eventually(has_successor)


def stream(client, max_tokens):
    return client.generate(PROMPT, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))


def test_pause_that_another_operator_has_ended_does_not_come_back_with_the_next_core(connect):
    first, second = connect(), connect()

    async def run():
        await first.pause_generation("keep")
        await second.resume_generation()
        await kill(first, second)
        assert not await first.is_paused()
        for client in (first, second):
            assert len((await rest(stream(client, 3))).token_ids) == 3

    asyncio.run(asyncio.wait_for(run(), 120))


def test_repeated_call_undoes_nothing_that_another_operator_asked_for_since(core, connect):
    address, key_file = core
    operator = connect()

    def pause():
        """Ask for a pause, always under the same id, as a client does that has had no answer."""
        connection = CoreConnection(address, None, ensure_operator_key(key_file))
        connection.greet(30, lambda: None)
        connection.send(wire.Call(connection.incarnation, 12345, "pause", ["keep", False]))
        while not isinstance(message := wire.decode_core_message(connection._socket.recv()), wire.Reply):
            pass
        connection.close()
        assert (message.call_id, message.error) == (12345, None)

    async def run():
        pause()
        assert await operator.is_paused()
        await operator.resume_generation()
        await kill(operator)
        pause()
        assert not await operator.is_paused()

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.parametrize("is_gone", [pytest.param(False, marks=pytest.mark.slow), True])
def test_core_sleeps_and_stays_paused_after_a_death_without_the_help_of_the_client_that_asked(connect, is_gone):
    first, second = connect(), connect(False)

    async def run():
        await first.sleep(2, mode="keep")
        await first.wake_up(["weights"])
        await first.pause_generation("keep")
        if is_gone:
            first.shutdown()
        waiting = asyncio.create_task(rest(stream(second, 3)))
        await kill(second)
        await eventually(num_waiting_is(second, 1))
        status = await second.core_status()
        assert (status["is_sleeping"], status["sleep_level"], status["is_paused"]) == (True, 2, True)
        operator = connect() if is_gone else first
        await operator.wake_up(["kv_cache"])
        assert await operator.is_paused()
        await operator.resume_generation()
        assert len((await waiting).token_ids) == 3

    asyncio.run(asyncio.wait_for(run(), 120))


def test_requests_from_before_a_pause_that_waits_for_them_run_to_their_ends_after_a_death(connect):
    operator, user = connect(), connect(False)

    async def run():
        early = stream(user, 60)
        await anext(early)
        pausing = asyncio.create_task(operator.pause_generation("wait"))
        await eventually(user.is_paused)
        late = asyncio.create_task(rest(stream(user, 3)))
        await eventually(num_waiting_is(user, 1))
        await kill(operator, user)
        assert len((await rest(early)).token_ids) == 60
        await pausing
        status = await user.core_status()
        assert (status["is_paused"], status["num_running"], status["num_waiting"]) == (True, 0, 1)
        await operator.resume_generation()
        assert len((await late).token_ids) == 3

    asyncio.run(asyncio.wait_for(run(), 120))


def test_calls_that_affect_all_clients_are_refused_by_name_to_a_client_that_is_no_operator(connect):
    operator, user = connect(), connect(False)

    async def run():
        for name, operation, args in (
            ("pause", user.pause_generation, ("abort",)),
            ("pause", user.pause_generation, ("wait",)),
            ("resume", user.resume_generation, ()),
            ("sleep", user.sleep, ()),
            ("wake_up", user.wake_up, ()),
            ("reset_prefix_cache", user.reset_prefix_cache, ()),
            ("start_profile", user.start_profile, ()),
            ("stop_profile", user.stop_profile, ()),
            ("collective_rpc", user.collective_rpc, ("get_num_parameters",)),
        ):
            with pytest.raises(NotOperatorError, match=rf"^{name} is for operators.*operator_key_file") as caught:
                await operation(*args)
            assert isinstance(caught.value, EngineError)
            assert isinstance(caught.value, PermissionError)
        assert not await operator.is_paused()
        assert not await operator.is_sleeping()
        assert (await answer(user, PROMPT, greedy(3))).finished

    asyncio.run(asyncio.wait_for(run(), 120))


def test_single_request_ends_while_most_of_another_clients_2000_requests_wait(connect):
    many, single = connect(False), connect(False)

    async def run():
        streams = [await many.add_request(None, PROMPT, greedy(20, ignore_eos=True)) for _ in range(2000)]

        async def core_has_most():
            return (await single.core_status())["num_waiting"] > 1800

        await eventually(core_has_most)
        assert len((await rest(stream(single, 20))).token_ids) == 20
        assert (await single.core_status())["num_waiting"] > 1500
        assert len(streams) == 2000

    asyncio.run(asyncio.wait_for(run(), 120))
