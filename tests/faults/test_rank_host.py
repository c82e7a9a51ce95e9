"""A machine with ranks that dies, hangs or comes back, and a core that dies: streams go on, and no rank is left."""

import asyncio
import os
import re
import signal

import pytest
from support.engine_fixtures import SLOW_STEPS
from support.rank_streams import ended, expected_tokens, rank_pids, tokens_after

from vllm_mp import AsyncLLM, EngineDeadError
from vllm_mp.client.cores.sources.handover import ask_to_take_over
from vllm_mp.testing.engines import eventually, running_engine, standalone_core
from vllm_mp.testing.machines import OtherMachine, running_on_two_machines

pytestmark = pytest.mark.usefixtures("forked_programs", "forked_ranks")

OPTIONS = {
    "tensor_parallel_size": 2,
    "num_threads": 1,
    "max_model_len": 256,
    "start_timeout_s": 60.0,
    "fault_injection": SLOW_STEPS,
}
STAGES = {"pipeline_parallel_size": 2}
"""Options with which each machine has a stage of two ranks."""


@pytest.fixture
def machine(request, small_model, tmp_path):
    """The machine of half of the ranks of an engine; a test may parametrize its options."""
    machine = OtherMachine(small_model, tmp_path, **{**OPTIONS, **getattr(request, "param", {})})
    machine.start()
    yield machine
    machine.kill()


def test_streams_continue_after_the_death_of_a_machine_and_of_the_core(small_model, machine, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"

    async def run():
        engine = await asyncio.to_thread(AsyncLLM.connect, address)
        try:
            expected = await expected_tokens(engine)
            first = await rank_pids(engine)

            def replace_machine(pids):
                machine.kill()
                machine.start()

            assert await tokens_after(engine, replace_machine) == expected
            second = await rank_pids(engine)
            assert ended(first)
            assert await tokens_after(engine, lambda pids: os.kill(pids[0], signal.SIGKILL)) == expected
            assert machine.process.poll() is None
            assert ask_to_take_over(address) is None, "the other machine serves one core at a time"
            return [*first, *second, *await rank_pids(engine)]
        finally:
            engine.shutdown()

    with standalone_core(small_model, address, *machine.flags, stderr=None):
        pids = asyncio.run(run())

    async def none_is_left():
        return ended(pids)

    asyncio.run(eventually(none_is_left))
    machine.process.terminate()
    assert machine.process.wait(20) == 0


@pytest.mark.slow
def test_machine_that_hangs_is_named_and_replaced(small_model, machine):
    with running_engine(small_model, **{**machine.options, "engine_iteration_timeout_s": 3.0}) as engine:

        async def run():
            expected = await expected_tokens(engine)
            log = engine.cores.first.supervisor.core.process.log_path

            async def is_named():
                return "the rank host of node 1" in log.read_text()

            async def replace_machine():
                await eventually(is_named)
                machine.kill()
                machine.start()

            replacing = []

            def stop_machine(pids):
                machine.process.send_signal(signal.SIGSTOP)
                replacing.append(asyncio.ensure_future(replace_machine()))

            assert await tokens_after(engine, stop_machine) == expected
            await replacing[0]

        asyncio.run(run())


@pytest.mark.slow
def test_stage_on_another_machine_that_stops_is_named_and_replaced(small_model, tmp_path):
    options = {**OPTIONS, "tensor_parallel_size": 1, "pipeline_parallel_size": 2, "engine_iteration_timeout_s": 3.0}
    with running_on_two_machines(small_model, tmp_path, **options) as (engine, _):

        async def run():
            expected = await expected_tokens(engine)
            log = engine.cores.first.supervisor.core.process.log_path
            assert await tokens_after(engine, lambda pids: os.kill(pids[1], signal.SIGSTOP)) == expected
            assert re.search(r"rank 1 \(stage 1, node 1, .*\) has made no progress", log.read_text())

        asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "rank", "place"),
    [({}, 1, ""), (STAGES, 3, "stage 1, ")],
    ids=["tensor", "stages"],
    indirect=["machine"],
)
def test_error_names_the_machine_of_the_rank_that_died(small_model, machine, rank, place):
    with running_engine(small_model, **machine.options, recovery=False) as engine:

        async def run():
            await expected_tokens(engine)
            cause = rf"node 1 \(.*\): rank {rank} \({place}process \d+\) ended with signal SIGKILL"
            with pytest.raises(EngineDeadError, match=cause):
                await tokens_after(engine, lambda pids: os.kill(pids[rank], signal.SIGKILL))

        asyncio.run(run())


@pytest.mark.slow
def test_streams_end_with_the_command_for_a_machine_that_does_not_come_back(small_model, machine):
    with running_engine(small_model, **{**machine.options, "start_timeout_s": 25.0}) as engine:

        async def run():
            await expected_tokens(engine)
            with pytest.raises(
                EngineDeadError, match=r"node 1 has not joined, after 20 s: on its machine run `vllm-mp"
            ):
                await tokens_after(engine, lambda pids: machine.kill())

        asyncio.run(run())
