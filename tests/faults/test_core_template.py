"""Cores that are forked from a template process: they are as other cores are, and the template is never missed."""

import asyncio
import logging
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from support.model_templates import model_template_of

from vllm_mp import SamplingParams
from vllm_mp.client.cores.sources.template import CoreTemplate
from vllm_mp.testing.engines import answer, eventually, greedy, standalone_core

PROMPT = "The history of the city begins"
PROCESS_NAME = "core-template"
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def process_of(engine):
    return engine.cores.first.supervisor.core.process


def log_of_fork(engine, template):
    """Return what the log says if `template` has forked the core."""
    return f"the core process {process_of(engine).pid} was forked from the template process {template.pid}"


async def answer_while_the_core_is_killed(engine, before_kill=lambda: None):
    """Return the token ids of an answer in whose course the core is killed."""
    ids = []
    async for output in engine.generate(PROMPT, PARAMS):
        if not ids:
            before_kill()
            process_of(engine).send_signal(signal.SIGKILL)
        ids = output.outputs[0].token_ids
    return ids


@pytest.fixture
def template(monkeypatch):
    """The template of the engines that a test makes, beside that of engines which other tests have made."""
    own = CoreTemplate()
    monkeypatch.setattr("vllm_mp.client.cores.sources.launcher.TEMPLATE", own)
    return own


async def wait_until_ready(template):
    async def is_ready():
        return template.prepare() and template.pid is not None

    await eventually(is_ready)


async def is_true(value):
    return value


def has_ended(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pids_of_templates():
    return {child.pid for child in psutil.Process().children() if child.name() == PROCESS_NAME}


@pytest.mark.essential
@pytest.mark.usefixtures("forked_cores")
def test_killed_core_is_replaced_by_a_fork_and_its_stream_goes_on(make_small_engine, template, caplog):
    caplog.set_level(logging.INFO)
    engine = make_small_engine()

    async def run():
        expected = (await answer(engine, PROMPT, PARAMS)).outputs[0].token_ids
        with_model = process_of(engine).model_template
        for _ in range(2):
            await wait_until_ready(template)
            assert await answer_while_the_core_is_killed(engine) == expected
            assert log_of_fork(engine, with_model) in caplog.text
        return with_model

    with_model = asyncio.run(run())
    pids = {template.pid, with_model.pid}
    assert len(pids) == 2
    assert pids <= pids_of_templates()
    engine.shutdown()
    assert template.pid is with_model.pid is None
    assert not pids & pids_of_templates()


async def standby_of(engine):
    """Return the process that was forked ahead, once it waits."""

    async def waits():
        standby = engine.cores.first.supervisor._source._standby
        return standby is not None and standby.is_waiting()

    await eventually(waits)
    return engine.cores.first.supervisor._source._standby


@pytest.mark.usefixtures("forked_cores")
def test_process_that_was_forked_ahead_becomes_the_core(make_small_engine, template, monkeypatch):
    monkeypatch.setattr("vllm_mp.client.cores.sources.launcher._AHEAD_DELAY_S", 0.0)
    monkeypatch.setattr("vllm_mp.client.cores.supervisor._TEMPLATE_DELAY_S", 0.0)
    engine = make_small_engine()

    async def run():
        expected = (await answer(engine, PROMPT, PARAMS)).outputs[0].token_ids
        for _ in range(2):
            standby = await standby_of(engine)
            assert await answer_while_the_core_is_killed(engine) == expected
            assert process_of(engine) is standby
            assert (await engine.core_status())["num_recomputed_tokens"] == 0
        standby = await standby_of(engine)
        assert await answer_while_the_core_is_killed(engine, lambda: standby.send_signal(signal.SIGKILL)) == expected
        assert process_of(engine) is not standby

    asyncio.run(run())


@pytest.mark.usefixtures("forked_cores")
def test_process_that_was_forked_ahead_ends_with_the_weights(make_small_engine, template, monkeypatch):
    monkeypatch.setattr("vllm_mp.client.cores.sources.launcher._AHEAD_DELAY_S", 0.0)
    engine = make_small_engine()

    async def run():
        expected = (await answer(engine, PROMPT, PARAMS)).outputs[0].token_ids
        standby = await standby_of(engine)
        await engine.sleep(level=2)

        async def is_gone():
            return engine.cores.first.supervisor.standby_pid is None

        await eventually(is_gone)
        assert not standby.is_alive()
        await engine.wake_up()
        assert await answer_while_the_core_is_killed(engine) == expected

    asyncio.run(run())


@pytest.mark.usefixtures("forked_cores")
def test_core_without_a_template_that_has_its_model_loads_it_and_leaves_such_a_template(
    make_small_engine, template, caplog
):
    caplog.set_level(logging.INFO)
    engine = make_small_engine()

    async def run():
        expected = (await answer(engine, PROMPT, PARAMS)).outputs[0].token_ids
        await wait_until_ready(template)
        with_model = await model_template_of(engine)
        ids = await answer_while_the_core_is_killed(engine, lambda: os.kill(with_model.pid, signal.SIGKILL))
        assert ids == expected
        assert log_of_fork(engine, template) in caplog.text
        another = await model_template_of(engine)
        assert another is not with_model
        assert await answer_while_the_core_is_killed(engine) == expected
        assert log_of_fork(engine, another) in caplog.text

    asyncio.run(run())


@pytest.mark.usefixtures("forked_cores")
def test_after_a_fork_that_does_not_start_the_next_core_loads_the_model(make_small_engine, template, caplog):
    caplog.set_level(logging.INFO)
    engine = make_small_engine(fault_injection="exit@load,incarnation=2")

    async def run():
        expected = (await answer(engine, PROMPT, PARAMS)).outputs[0].token_ids
        await wait_until_ready(template)
        former = await model_template_of(engine)
        assert await answer_while_the_core_is_killed(engine) == expected
        assert (await engine.core_status())["incarnation"] == 3
        assert former.pid is None
        assert log_of_fork(engine, template) in caplog.text
        assert (await model_template_of(engine)).pid is not None

    asyncio.run(run())


@pytest.mark.usefixtures("forked_cores")
def test_after_a_fork_that_another_process_kills_the_next_core_has_the_model_and_the_cache(make_small_engine, template):
    engine = make_small_engine(fault_injection="kill@load,incarnation=2")

    async def run():
        expected = (await answer(engine, PROMPT, PARAMS)).outputs[0].token_ids
        await wait_until_ready(template)
        former = await model_template_of(engine)
        assert await answer_while_the_core_is_killed(engine) == expected
        status = await engine.core_status()
        assert (status["incarnation"], status["num_recomputed_tokens"]) == (3, 0)
        assert (await model_template_of(engine)).pid == former.pid is not None

    asyncio.run(run())


@pytest.mark.usefixtures("forked_cores")
def test_sleep_that_drops_the_weights_ends_the_template_that_shares_them(make_small_engine, template):
    engine = make_small_engine()

    async def run():
        expected = (await answer(engine, PROMPT, PARAMS)).outputs[0].token_ids
        await wait_until_ready(template)
        shares = psutil.Process((await model_template_of(engine)).pid)
        await engine.sleep(level=1)
        assert not has_ended(shares)
        await engine.sleep(level=2)
        await eventually(lambda: is_true(has_ended(shares)))
        await engine.wake_up()
        assert await answer_while_the_core_is_killed(engine) == expected
        assert await answer_while_the_core_is_killed(engine) == expected

    asyncio.run(run())


@pytest.mark.usefixtures("forked_cores")
def test_core_that_replaced_another_is_followed_by_forks_that_have_its_model(make_small_engine, template, caplog):
    caplog.set_level(logging.INFO)
    engine = make_small_engine()

    async def run():
        expected = (await answer(engine, PROMPT, PARAMS)).outputs[0].token_ids
        former = await model_template_of(engine)
        await engine.restart_core()
        assert former.pid is None
        with_model = await model_template_of(engine)
        assert await answer_while_the_core_is_killed(engine) == expected
        assert log_of_fork(engine, with_model) in caplog.text

    asyncio.run(run())


def state_of(pid):
    """Return what the system knows of a core process, without what differs between any two cores."""
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    names = ("Umask", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Seccomp", "Cpus_allowed")
    targets = [os.readlink(link) for link in (process / "fd").iterdir()]
    return {
        "descriptors": sorted(re.sub(r".*/core-\d+|\[\d+\]", "", target) for target in targets),
        "environment": sorted((process / "environ").read_bytes().split(b"\0")),
        "status": {name: status[name].strip() for name in names},
        "limits": (process / "limits").read_text(),
        "arguments": (process / "cmdline").read_bytes().rstrip(b"\0"),
        "folder": os.readlink(process / "cwd"),
        "session": os.getsid(pid),
        "leads its group": os.getpgid(pid) == pid,
        "parent": psutil.Process(pid).ppid(),
        "name": psutil.Process(pid).name(),
        # NumPy makes idle threads when it is imported, which a fork does not have before it needs them.
        "names of threads": {(task / "comm").read_text() for task in (process / "task").iterdir()},
        "priority": os.getpriority(os.PRIO_PROCESS, pid),
    }


def test_forked_core_is_to_the_system_as_a_plain_one(make_small_engine, template):
    async def state_after_an_answer(engine):
        assert (await answer(engine, PROMPT, greedy(4, ignore_eos=True))).outputs[0].token_ids
        return state_of(process_of(engine).pid)

    async def run():
        plain = make_small_engine(core_template=False)
        await answer_while_the_core_is_killed(plain)
        expected = await state_after_an_answer(plain)
        plain.shutdown()
        engine = make_small_engine()
        first = await state_after_an_answer(engine)
        await wait_until_ready(template)
        await answer_while_the_core_is_killed(engine)
        return expected, first, await state_after_an_answer(engine)

    expected, first, forked = asyncio.run(run())
    expected["descriptors"] = sorted([*expected["descriptors"], "anon_inode:[pidfd]"])  # the template with its model
    assert first == expected
    assert forked == expected


@pytest.mark.usefixtures("forked_cores")
def test_core_starts_as_usual_if_the_template_dies_too_and_another_follows(
    make_small_engine, template, monkeypatch, caplog
):
    monkeypatch.setattr("vllm_mp.client.cores.sources.template._RETRY_S", 0.0)
    caplog.set_level(logging.INFO)
    engine = make_small_engine()

    async def run():
        expected = (await answer(engine, PROMPT, PARAMS)).outputs[0].token_ids
        await wait_until_ready(template)
        killed = [template.pid, (await model_template_of(engine)).pid]

        def kill_templates():
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

        assert await answer_while_the_core_is_killed(engine, kill_templates) == expected
        assert "was forked" not in caplog.text
        await wait_until_ready(template)
        assert template.pid not in killed
        with_model = await model_template_of(engine)
        assert await answer_while_the_core_is_killed(engine) == expected
        assert log_of_fork(engine, with_model) in caplog.text

    asyncio.run(run())


@pytest.mark.usefixtures("forked_cores")
def test_cause_of_the_death_of_a_forked_core_is_exact(make_small_engine, template):
    engine = make_small_engine()

    async def run():
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM):
            await wait_until_ready(template)
            await answer_while_the_core_is_killed(engine)
            forked = process_of(engine)
            stream = engine.generate(PROMPT, PARAMS)
            await anext(stream)
            os.kill(forked.pid, number)
            assert [output async for output in stream][-1].finished
            cause = (await engine.core_status())["last_death"]
            assert f"the core process {forked.pid} ended with signal {number.name}" in cause

    asyncio.run(run())


@pytest.mark.usefixtures("forked_cores")
def test_without_the_option_there_is_no_template(make_small_engine, template):
    before = pids_of_templates()
    engine = make_small_engine(core_template=False)

    async def run():
        await answer_while_the_core_is_killed(engine)
        assert template.pid is None
        assert pids_of_templates() == before

    asyncio.run(run())


def test_template_ends_when_the_parent_of_a_shared_core_is_killed(small_model, tmp_path):
    with standalone_core(small_model, f"ipc://{tmp_path}/core.sock") as parent:
        children = []

        async def has_templates_and_core():
            children[:] = psutil.Process(parent.pid).children()
            return [child.name() for child in children].count(PROCESS_NAME) == 2

        async def all_have_ended():
            return not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)

        async def run():
            await eventually(has_templates_and_core, 100)
            parent.kill()
            await eventually(all_have_ended)

        asyncio.run(run())
