"""The simulation of many cores: nothing is lost or invented, and each policy does what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mp import AsyncEngineArgs
from vllm_mp.client.cores.router import CHUNK_TOKENS
from vllm_mp.testing.cluster import (
    POLICIES,
    Cluster,
    ClusterOptions,
    CoreLimits,
    Drawing,
    Lengths,
    StepModel,
    TraceRequest,
    at_rate,
    draw,
    errors,
    figures,
    fit,
    load_recorded,
    read,
    table,
)
from vllm_mp.testing.cluster.policies import RoundRobin
from vllm_mp.testing.cluster.prefix_cache import Holders, PrefixCache
from vllm_mp.testing.cluster.step_recorder import QUICK, record
from vllm_mp.testing.random_models import CONFIGS, save_random_model

TOOL = Path(__file__).resolve().parents[3] / "tools" / "simulate_cluster.py"
MODEL = StepModel(base=0.01, row=0.001, context=5e-6, read=0.001, pair=1e-6)
CHATS = Drawing(
    num_requests=400,
    rate=2.0,
    prompt=Lengths(200, 0.8),
    output=Lengths(60, 0.8),
    turns=3,
    think_s=5.0,
    num_systems=2,
    system_tokens=256,
    max_tokens=2048,
)


def run(requests, num_cores=4, cache_tokens=16_384, **options):
    restart_s = options.pop("restart_s", 5.0)
    limits = CoreLimits(cache_tokens, 512, 64, restart_s)
    return Cluster(ClusterOptions(num_cores, MODEL, limits=limits, **options)).run(requests)


def single(arrival, num_prompt, num_output, hashes=()):
    return TraceRequest(arrival, num_prompt, num_output, hashes, 0)


def first_tokens(outcome):
    return [job.first_token_s - job.request.arrival for job in outcome.jobs]


def check_conserved(outcome):
    """Assert that every request has all its tokens, and that no core holds anything for it any more."""
    for job in outcome.jobs:
        assert job.request.arrival < job.first_token_s <= job.ended_s
        assert job.num_generated == job.request.num_output
        assert job.num_lost == 0
    for core in outcome.cores:
        assert not core.jobs()
        assert core.in_use == core.context == core.num_unread == 0
        assert not core.cache.users
        assert len(core.cache.idle) * CHUNK_TOKENS <= core.limits.cache_tokens


def num_computed(outcome):
    """Return the prompt tokens read and the tokens decoded by all cores."""
    return sum(core.num_read for core in outcome.cores), sum(core.num_decoded for core in outcome.cores)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_fronts", [1, 3])
def test_every_request_ends_with_all_its_tokens(policy, num_fronts):
    requests = draw(CHATS, 0)
    outcome = run(requests, policy=policy, num_fronts=num_fronts)
    check_conserved(outcome)
    assert [job.request for job in outcome.jobs] == requests
    num_read, num_decoded = num_computed(outcome)
    assert num_read == sum(request.num_prompt for request in requests) - sum(job.hit for job in outcome.jobs)
    assert num_decoded == sum(request.num_output - 1 for request in requests)
    assert sum(core.num_begun for core in outcome.cores) == len(requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_when_cores_die_and_room_is_scarce(policy):
    requests = draw(CHATS, 1)
    outcome = run(requests, policy=policy, cache_tokens=3000, mean_life_s=20.0, num_fronts=2)
    check_conserved(outcome)
    assert outcome.num_deaths > 10
    assert outcome.num_moved > 10
    assert sum(core.num_preemptions for core in outcome.cores) > 0


def test_equal_seeds_give_equal_figures_and_other_seeds_do_not():
    def found(seed):
        options = ClusterOptions(4, MODEL, mean_life_s=30.0, num_fronts=2, seed=seed)
        return figures(options, Cluster(options).run(draw(CHATS, seed)))

    assert found(3) == found(3) != found(4)


class WatchedRoundRobin(RoundRobin):
    """Keeps the core of each live request, as far as it is told."""

    def __init__(self):
        super().__init__(0)
        self.core_of = {}

    def note_sent(self, job):
        assert job not in self.core_of
        self.core_of[job] = job.core

    def note_read(self, job):
        assert self.core_of[job] == job.core

    def note_left(self, job):
        assert self.core_of.pop(job) == job.core


def test_a_policy_is_told_of_every_request_that_comes_and_leaves(monkeypatch):
    watched = WatchedRoundRobin()
    monkeypatch.setattr(Cluster, "_front", lambda self, number: watched)
    outcome = run(draw(CHATS, 0), cache_tokens=4096, mean_life_s=20.0)
    assert outcome.num_moved > 10
    assert not watched.core_of


def test_one_core_is_a_plain_queue_with_every_policy():
    outcomes = [run(draw(CHATS, 0), num_cores=1, policy=policy) for policy in POLICIES]
    assert len({tuple(first_tokens(outcome)) for outcome in outcomes}) == 1
    started = sorted(outcomes[0].jobs, key=lambda job: job.first_token_s)
    assert [job.number for job in started] == sorted(job.number for job in started)


def test_times_of_a_lone_request_are_those_of_the_model():
    (job,) = run([single(2.0, 700, 3)], num_cores=1).jobs
    chunks = MODEL.seconds(0, 0, 512, 512 * 513 / 2) + MODEL.seconds(0, 0, 188, 188 * 512 + 188 * 189 / 2)
    assert job.first_token_s == pytest.approx(2.0 + chunks)
    assert job.ended_s == pytest.approx(2.0 + chunks + MODEL.seconds(1, 701) + MODEL.seconds(1, 702))


def test_an_arrival_is_admitted_after_the_step_that_runs():
    first, second = run([single(0.0, 100, 500), single(1.0, 100, 2)], num_cores=1).jobs
    own = MODEL.seconds(1, 0, 100, 100 * 101 / 2)
    wait = second.first_token_s - 1.0 - own
    assert 0 <= wait <= MODEL.seconds(1, 700) + 700 * MODEL.context
    assert first.num_generated == 500


def test_a_prefix_hit_saves_exactly_its_tokens():
    hashes = list(range(20))
    requests = [single(0.0, 1000, 1, hashes[:15]), single(50.0, 1000, 1, [*hashes[:10], 900, 901, 902, 903, 904])]
    outcome = run(requests, num_cores=1)
    assert [job.hit for job in outcome.jobs] == [0, 10 * CHUNK_TOKENS]
    assert num_computed(outcome)[0] == 2000 - 10 * CHUNK_TOKENS


def test_the_last_token_of_a_prompt_is_read_even_if_all_is_cached():
    requests = [single(0.0, 128, 1, [1, 2]), single(9.0, 128, 1, [1, 2])]
    assert [job.hit for job in run(requests, num_cores=1).jobs] == [0, CHUNK_TOKENS]


def test_the_next_turn_of_a_chat_finds_the_answer_in_the_cache():
    turns = [single(0.0, 64, 65, [1, 2]), single(60.0, 200, 2, [1, 2, 3])]
    assert run(turns, num_cores=1).jobs[1].hit == 2 * CHUNK_TOKENS


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    cache = PrefixCache(0, Holders())
    assert all(map(cache.register, [1, 2, 3]))
    assert cache.release([1, 2, 3]) == 3
    cache.evict(2)
    assert cache.find([1, 2, 3], 3) == 2


def test_the_oldest_prefixes_are_evicted_when_there_is_no_room():
    requests = [single(20.0 * number, 640, 1, list(range(100 * number, 100 * number + 10))) for number in range(4)]
    again = [requests[0]._replace(arrival=100.0), requests[3]._replace(arrival=90.0)]
    jobs = run(requests + again[::-1], num_cores=1, cache_tokens=2 * 700).jobs
    assert [job.hit for job in jobs[4:]] == [9 * CHUNK_TOKENS, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_death_loses_only_what_the_dead_core_had(policy):
    requests = draw(CHATS, 2)
    outcome = run(requests, policy=policy, mean_life_s=60.0)
    num_read, num_decoded = num_computed(outcome)
    num_reread = sum(core.num_reread for core in outcome.cores)
    assert 0 < num_reread <= outcome.num_dead
    num_begun = sum(core.num_begun for core in outcome.cores)
    assert num_begun + num_decoded == sum(request.num_output for request in requests)
    # The latest token of a request that moves was not computed before.
    own = sum(job.request.num_prompt - job.hit for job in outcome.jobs)
    assert num_read <= own + num_reread + outcome.num_moved


def run_with_a_death(num_cores, requests, **options):
    """Run requests, while core 0 dies after 5 seconds and does not come back."""
    limits = CoreLimits(200_000, 512, 64, restart_s=1e6)
    cluster = Cluster(ClusterOptions(num_cores, MODEL, limits=limits, **options))
    cluster.plan_death(0, 5.0)
    return cluster.run(requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_of_a_dead_core_go_on_at_once_elsewhere(policy):
    requests = [single(0.0, 600, 1000) for _ in range(8)]
    outcome = run_with_a_death(2, requests, policy=policy)
    check_conserved(outcome)
    moved = [job for job in outcome.jobs if job.pauses]
    assert (outcome.num_deaths, outcome.num_moved) == (1, len(moved))
    assert 0 < len(moved) < 8
    read_s = 8 * 2 * MODEL.seconds(8, 8 * 1600, 512, 512 * 1600)
    assert all(job.core == 1 and len(job.pauses) == 1 and job.pauses[0] < read_s for job in moved)
    # What stayed on the other core lost nothing.
    assert outcome.num_dead <= sum(600 + 1000 for job in moved)


def test_requests_in_the_step_of_a_death_share_a_core_unless_they_are_spread():
    requests = [single(0.0, 50, 2000) for _ in range(30)]
    for spreads, num_shelters in ((False, 1), (True, 2)):
        outcome = run_with_a_death(3, requests, spreads_exposed=spreads)
        assert len({job.core for job in outcome.jobs if job.pauses}) == num_shelters


def test_requests_wait_for_the_first_core_that_is_back_when_all_are_dead():
    cluster = Cluster(ClusterOptions(1, MODEL, limits=CoreLimits(10_000, 512, 64, restart_s=30.0)))
    cluster.plan_death(0, 5.0)
    outcome = cluster.run([single(0.0, 600, 1000), single(10.0, 60, 10)])
    check_conserved(outcome)
    assert [job.first_token_s > 35.0 for job in outcome.jobs] == [False, True]
    assert outcome.jobs[0].pauses[0] > 30.0


@pytest.mark.parametrize("drawing", [CHATS, CHATS._replace(turns=1.0, num_systems=0)], ids=["chats", "single"])
def test_oracle_and_router_are_not_worse_than_simple_policies(drawing):
    records = {}
    for policy in POLICIES:
        options = ClusterOptions(4, MODEL, policy, CoreLimits(16_384))
        records[policy] = figures(options, Cluster(options).run(draw(drawing, 0)))
    for name in ("round-robin", "least-requests"):
        for best in ("oracle", "router"):
            assert records[best]["first_token_median_s"] <= 1.05 * records[name]["first_token_median_s"]
    assert records["oracle"]["first_token_median_s"] <= 1.1 * records["router"]["first_token_median_s"]


def test_chats_that_stay_with_a_front_keep_their_prefixes():
    hits = []
    for options in ({}, {"num_fronts": 8, "chats_stay": True}, {"num_fronts": 8}):
        outcome = run(draw(CHATS, 0), num_cores=8, **options)
        hits.append(sum(job.hit for job in outcome.jobs))
    assert hits[0] > hits[2]
    assert hits[1] > hits[2]


def test_fronts_do_not_choose_the_same_of_equal_cores():
    outcome = run([single(0.0, 600, 10) for _ in range(16)], num_cores=16, num_fronts=100)
    assert len({job.core for job in outcome.jobs}) > 6


def test_many_decodes_take_as_long_as_one_by_one():
    one_by_one = sum(MODEL.seconds(3, 500 + 3 * step) for step in range(40))
    assert MODEL.decode_seconds(40, 3, 500) == pytest.approx(one_by_one)
    for count in (0, 1, 17, 40):
        seconds = MODEL.decode_seconds(count, 3, 500)
        assert MODEL.num_steps_in(seconds, 3, 500) == count
        assert MODEL.num_steps_in(seconds + 0.005, 3, 500) == count


def test_fit_finds_the_model_that_made_the_steps():
    steps = [
        [rows, context, read, pairs, MODEL.seconds(rows, context, read, pairs)]
        for rows, context, read, pairs in (
            (1, 10, 0, 0),
            (9, 4000, 0, 0),
            (0, 0, 50, 1275),
            (3, 900, 512, 9e5),
            (2, 9, 7, 28),
        )
    ]
    assert fit(steps) == pytest.approx(MODEL)
    assert errors(fit(steps), steps).max() < 1e-6


def test_recorded_steps_fit_the_model():
    recording = load_recorded()
    assert recording["processor"]
    assert recording["commit"]
    wrong = sorted(errors(fit(recording["steps"]), recording["steps"]).tolist())
    assert wrong[len(wrong) // 2] < 0.1


def test_steps_of_a_core_are_recorded(tmp_path):
    options = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_batched_tokens": 32}
    save_random_model(CONFIGS["llama"], tmp_path / "model")
    record(AsyncEngineArgs(str(tmp_path / "model"), **options), tmp_path / "steps.json", QUICK, "a commit")
    recording = load_recorded(tmp_path / "steps.json")
    assert recording["commit"] == "a commit"
    steps = [dict(zip(recording["columns"], step, strict=True)) for step in recording["steps"]]
    assert all(step["seconds"] > 0 for step in steps)
    for rows, context in ((1, 16), (3, 40)):
        assert any(step["rows"] == rows and step["context"] >= rows * context and not step["read"] for step in steps)
    assert sum(step["read"] for step in steps) == (1 + 3) * (16 + 40)
    # A prompt of 40 tokens is read in two steps, the second of which attends to the first.
    assert {"read": 8, "pairs": 8 * 32 + 36} in [{name: step[name] for name in ("read", "pairs")} for step in steps]


def test_an_azure_trace_is_read(tmp_path):
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:51.0,879,0\n"
    )
    first, second = read(file)
    assert first[:4] == (0.0, 374, 44, ())
    assert second[:3] == (pytest.approx(4.314579, abs=1e-6), 396, 109)
    file.write_text("TIMESTAMP,ContextTokens\n")
    with pytest.raises(ValueError, match="no column GeneratedTokens"):
        read(file)
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n")
    with pytest.raises(ValueError, match=r"azure.csv:2: .*'x'"):
        read(file)


def test_a_mooncake_trace_is_read_with_its_prefixes(tmp_path):
    file = tmp_path / "mooncake.jsonl"
    lines = [
        {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
        {"timestamp": 30535, "input_length": 1024, "output_length": 26, "hash_ids": [46, 99]},
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    requests = read(file)
    assert [(request.arrival, request.num_prompt, request.num_output) for request in requests] == [
        (0.0, 1100, 52),
        (pytest.approx(3.053), 1024, 26),
    ]
    assert [len(request.hashes) for request in requests] == [1100 // CHUNK_TOKENS, 1024 // CHUNK_TOKENS]
    assert [job.hit for job in run(at_rate(requests, 0.01), num_cores=1).jobs] == [0, 512]
    file.write_text('{"timestamp": 1}\n')
    with pytest.raises(ValueError, match=r"mooncake.jsonl:1: KeyError\('input_length'\)"):
        read(file)


def test_drawn_lengths_and_times_follow_their_parameters():
    requests = draw(CHATS._replace(num_requests=3000, turns=1.0, num_systems=1, system_tokens=64), 0)
    asked = sorted(request.num_prompt - 64 for request in requests)
    assert asked[1500] == pytest.approx(200, rel=0.1)
    assert 3000 / requests[-1].arrival == pytest.approx(2.0, rel=0.1)
    assert len({request.hashes[0] for request in requests if request.num_prompt >= 64}) == 1
    uniform = draw(CHATS._replace(num_requests=2000, turns=1.0, num_systems=0, prompt=Lengths(200, 0.0)), 0)
    assert min(request.num_prompt for request in uniform) >= 100
    assert max(request.num_prompt for request in uniform) <= 300


def test_requests_that_fit_no_core_are_refused_by_number():
    with pytest.raises(ValueError, match="request 1 has 2600 tokens, and a core has room for 2500"):
        run([single(0.0, 10, 1), single(1.0, 2000, 600)], cache_tokens=2500)


def run_tool(*arguments):
    command = [sys.executable, str(TOOL), "--cores", "2", "--requests", "100", "--life", "60", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_tool_prints_a_table_or_json():
    done = run_tool("--json")
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [record["policy"] for record in records] == list(POLICIES)
    assert table(records) in run_tool().stdout


@pytest.mark.extended
def test_the_tool_refuses_what_it_cannot_simulate(tmp_path):
    file = tmp_path / "azure.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3000,44\n")
    done = run_tool("--trace", str(file), "--cache-tokens", "2000")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no request of {file} fits --cache-tokens=2000" in done.stderr
    done = run_tool("--cores", "0")
    assert done.returncode == 2
    assert "--cores" in done.stderr
