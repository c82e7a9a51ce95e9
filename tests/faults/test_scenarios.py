"""Every scenario of `tools/faults` on a small model, and short soaks."""

import asyncio
import copy
import functools
import shutil
import tempfile
from pathlib import Path

import pytest
from support.image_models import IMAGE_TOKEN, image_tokenizer, placeholder, save_processor

from vllm_mp import AsyncEngineArgs, LoRARequest
from vllm_mp.testing.adapters import save_random_adapter
from vllm_mp.testing.faults import SCENARIOS, Baseline, every_case, play, run_shared_soak, run_soak
from vllm_mp.testing.faults.soak import MOMENTS
from vllm_mp.testing.image_models import save_image_model
from vllm_mp.testing.random_models import save_small_model

pytestmark = pytest.mark.usefixtures("forked_cores")

_TESTED_ELSEWHERE = {
    *("kill", "segv", "abort", "term", "stop", "spin", "slow-core", "exit-in-step", "exit-while-loading"),
    *("culprit-raises", "client-blocked-while-core-dies", "core-restarted-by-hand", "too-many-deaths", "no-recovery"),
    *("shared-core-killed", "shared-core-stopped", "constrained-streams"),
}
"""Scenarios that other tests of faults or similar scenarios cover."""
_TESTED_HERE = [scenario for name, scenario in SCENARIOS.items() if name not in _TESTED_ELSEWHERE]
_INJECTED = [scenario.injects for scenario in SCENARIOS.values()]
_WITH_A_PENDING_STEP = [
    SCENARIOS[name]
    for name in ("kill", "exit-before-message", "exit-before-last-message", "culprit-in-mid-answer", "nan")
]
_WITH_SHARED_ENGINE = [scenario for scenario in _TESTED_HERE if not scenario.options and not scenario.stands_alone]
_WITH_OWN_ENGINE = [scenario for scenario in _TESTED_HERE if scenario not in _WITH_SHARED_ENGINE]
_SLOW = {
    *("hang", "culprit", "culprit-in-mid-answer", "exit-before-message"),
    *("exit-before-last-message", "exit-after-last-message", "socket-file-removed", "client-crowd", "two-engines"),
}
"""Slow scenarios that are similar to fast scenarios, with a pending step or not, or to a fast test of recovery."""
_SLOW_WITH_A_PENDING_STEP = {"exit-before-message", "exit-before-last-message", "nan", "culprit-in-mid-answer"}
"""Slow scenarios that are fast without a pending step, or similar to a fast scenario."""


def _marked(scenarios, slow):
    unknown = slow - SCENARIOS.keys()
    assert not unknown, f"no scenario is named {unknown}"
    return [
        pytest.param(scenario, marks=[pytest.mark.slow] * (scenario.name in slow), id=scenario.name)
        for scenario in scenarios
    ]


@pytest.fixture(scope="module")
def baseline(default_model, tmp_path_factory):
    """Requests on a small model, whose steps are slowed down so that faults strike during the streams."""
    tmp_path_factory.getbasetemp()  # made at its first use, in the folder for temporary files at that time
    # With a private folder for temporary files, every file that is left in it comes from an engine.
    before, tempfile.tempdir = tempfile.tempdir, tempfile.mkdtemp(prefix="faults-", dir="/tmp")
    model = Path(tempfile.tempdir) / "model"
    save_small_model(model, default_model)
    yield Baseline(model, {"num_threads": 1}, streams=10, max_tokens=24, step=8, block_s=1.0, pace_s=0.005)
    shutil.rmtree(tempfile.tempdir)
    tempfile.tempdir = before


@pytest.fixture(scope="module")
def shared_engine(baseline):
    with baseline.share_engine(_INJECTED) as engine:
        yield engine


def test_folders_of_other_tests_outlive_the_private_folder(baseline, tmp_path):
    assert not tmp_path.is_relative_to(tempfile.gettempdir())


@pytest.mark.parametrize("scenario", _marked(_WITH_SHARED_ENGINE, _SLOW))
def test_promise_is_kept_on_a_shared_engine(baseline, shared_engine, scenario):
    assert play(scenario, baseline).broken == []


def test_no_fault_is_caused_once_the_streams_have_ended(baseline, shared_engine):
    late = copy.copy(baseline)
    late._step = 10**6

    async def pid():
        return (await shared_engine.core_status())["pid"]

    before = asyncio.run(pid())
    [broken] = play(SCENARIOS["kill"], late).broken
    assert "the streams ended before step 1000000, so no fault was caused" in broken
    assert "more output tokens than 24" in broken
    assert asyncio.run(pid()) == before


@pytest.mark.parametrize("scenario", _marked(_WITH_OWN_ENGINE, _SLOW))
def test_promise_is_kept_on_an_engine_with_own_options(baseline, scenario):
    assert play(scenario, baseline).broken == []


@pytest.fixture(scope="module")
def all_requests(baseline):
    """Requests of all kinds, also with LoRA adapters and JSON schemas, and with a common beginning."""
    config = AsyncEngineArgs(baseline.model).create_engine_config()
    adapters = [
        LoRARequest(
            f"adapter-{number}",
            number,
            str(
                save_random_adapter(
                    Path(tempfile.tempdir) / f"adapter-{number}", config.model_config.architecture, seed=number
                )
            ),
        )
        for number in (1, 2, 3)
    ]
    return Baseline(
        baseline.model,
        {**baseline.options, "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3},
        streams=20,
        max_tokens=24,
        make_cases=functools.partial(every_case, adapters=adapters),
        pace_s=0.005,
    )


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_nothing_is_lost_leaked_or_computed_again_at_whatever_moment_the_core_is_killed(all_requests, async_scheduling):
    result = run_soak(
        all_requests, kills=len(MOMENTS), fault_injection=all_requests.pace, async_scheduling=async_scheduling
    )
    assert result.broken == []
    assert result.kills_at == dict.fromkeys(MOMENTS, 1)
    assert result.restarts == len(MOMENTS)
    assert result.found > 100
    assert result.recomputed == result.leaked == 0
    assert len(result.next_token_s) == len(MOMENTS) - 1


@pytest.mark.slow
def test_nothing_is_lost_or_leaked_while_requests_come_and_go_and_cores_die_in_every_way(baseline):
    result = run_soak(baseline, kills=4, seed=1, is_random=True, fault_injection=baseline.pace)
    assert result.broken == []
    assert result.kills == 4


@pytest.mark.slow
@pytest.mark.parametrize("over_tcp", [False, True])
def test_nothing_is_lost_on_a_shared_core_beside_a_hostile_client(baseline, over_tcp):
    result = run_shared_soak(baseline, kills=2, over_tcp=over_tcp)
    assert result.broken == []
    assert result.kills == 2


@pytest.fixture(scope="module")
def overlapping(baseline):
    """The same requests and expected outputs, on an engine that launches the next step while a step is pending."""
    other = copy.copy(baseline)
    other.options = {**baseline.options, "async_scheduling": True}
    with other.share_engine(_INJECTED) as engine:
        assert engine.vllm_config.scheduler_config.async_scheduling
        yield other


@pytest.mark.parametrize("scenario", _marked(_WITH_A_PENDING_STEP, _SLOW_WITH_A_PENDING_STEP))
def test_promise_is_kept_with_a_pending_step(overlapping, scenario):
    assert play(scenario, overlapping).broken == []


@pytest.mark.slow
def test_nothing_is_lost_or_leaked_while_an_operator_calls_and_processes_beside_the_core_die(all_requests):
    result = run_soak(all_requests, kills=6, seed=1, is_random=True, calls=True, fault_injection=all_requests.pace)
    assert result.broken == []
    assert sum(result.calls.values()) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("baseline")  # for its private folder of temporary files
def test_nothing_is_lost_or_computed_again_of_requests_with_images_and_drafts(tmp_path):
    tokenizer = image_tokenizer()
    save_image_model(
        "qwen2_vl",
        tmp_path,
        tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        vocab_size=-(-len(tokenizer) // 8) * 8,
        max_position_embeddings=1024,
    )
    save_processor(tmp_path, "qwen2_vl")
    with_images = Baseline(
        tmp_path,
        {"num_threads": 1, "spec_method": "suffix"},
        streams=12,
        max_tokens=24,
        make_cases=functools.partial(every_case, placeholder=placeholder("qwen2_vl")),
        pace_s=0.005,
    )
    result = run_soak(with_images, kills=8, seed=1, is_random=True, fault_injection=with_images.pace)
    assert result.broken == []
    assert result.has_images
    assert result.recomputed == result.leaked == 0
