"""How fast prompts are read beside running streams, on machines of simulated speeds."""

import pytest
from support.stand_in_engine import Engine

from vllm_mp.core.scheduler.prefill_pace import MIN_TOKENS, PrefillPace

BUDGET = 512


class Machine:
    """A machine whose steps take a time that depends on their tokens alone, and a clock that they move."""

    def __init__(self, weights_s=0.02, per_token_s=0.002, prompts_s=0.0):
        """A step reads the weights, computes its tokens meanwhile or longer, and starts slower with prompts."""
        self.now = 0.0
        self.weights_s, self.per_token_s, self.prompts_s = weights_s, per_token_s, prompts_s
        self.times = []
        """Seconds of each step."""

    def clock(self):
        return self.now

    def seconds(self, num_prompt_tokens, num_decodes):
        tokens = num_prompt_tokens + num_decodes
        return max(self.weights_s, tokens * self.per_token_s) + (self.prompts_s if num_prompt_tokens else 0)

    def run(self, num_prompt_tokens, num_decodes):
        self.times.append(self.seconds(num_prompt_tokens, num_decodes))
        self.now += self.times[-1]


MACHINES = {
    "slow": Machine(0.03, 0.003),
    "fast": Machine(0.01, 0.0001),
    "with graphs": Machine(0.002, 0.00005, prompts_s=0.008),
    "computing": Machine(0.0, 0.003),
}


def read(pace, machine, num_tokens, num_decodes=8, num_prompts=1):
    """Read a prompt beside decodes; return the tokens of each step."""
    counts = []
    while num_tokens:
        count = min(num_tokens, pace.limit(num_decodes, num_prompts, BUDGET - num_decodes))
        machine.run(count, num_decodes)
        pace.observe(count, num_decodes, machine.times[-1])
        counts.append(count)
        num_tokens -= count
    return counts


def after_a_start(slowdown, machine, num_decodes=8):
    """Return the pace after a prompt was read alone and streams have run for a while."""
    pace = PrefillPace(slowdown)
    for count in (BUDGET, 100):
        pace.observe(count, 0, machine.seconds(count, 0))
    for _ in range(20):
        pace.observe(0, num_decodes, machine.seconds(0, num_decodes))
    return pace


@pytest.mark.parametrize("name", MACHINES)
def test_long_prompt_lengthens_steps_to_about_twice_their_time_and_wastes_none(name):
    machine = MACHINES[name]
    pace, usual = after_a_start(2.0, machine), machine.seconds(1, 8)
    machine.times.clear()
    counts = read(pace, machine, 4000)
    assert max(machine.times) <= 2.5 * usual
    assert counts.count(0) <= len(counts) // 60
    machine.times.clear()
    read(pace, machine, 4000)
    assert max(machine.times) <= 2.4 * usual
    assert sum(machine.times) / len(machine.times) > 1.25 * usual, "the prompt has its share of the time"


def test_first_prompt_beside_a_stream_finds_no_step_that_is_much_too_long():
    machine = Machine(0.03, 0.003)
    pace = PrefillPace(2.0)
    pace.observe(20, 0, machine.seconds(20, 0))
    counts = read(pace, machine, 200, num_decodes=1)
    assert counts[0] == MIN_TOKENS
    assert max(machine.times) <= 2.4 * machine.seconds(1, 1)


def test_many_waiting_prompts_fill_the_steps():
    machine = Machine(0.02, 0.0005)
    pace = after_a_start(2.0, machine)
    assert pace.limit(8, 1, BUDGET) < 100
    assert pace.limit(8, 3, BUDGET) <= 4 * pace.limit(8, 1, BUDGET)
    for _ in range(8):
        count = pace.limit(8, 40, BUDGET)
        pace.observe(count, 8, machine.seconds(count, 8))
    assert pace.limit(8, 40, BUDGET) == BUDGET


def test_pace_follows_a_machine_that_becomes_slower_and_faster():
    fast, slow = Machine(0.01, 0.0002), Machine(0.02, 0.002)
    pace = after_a_start(2.0, fast)
    read(pace, fast, 2000)
    assert pace.limit(8, 1, BUDGET) > 40
    read(pace, slow, 1000)
    slow.times.clear()
    read(pace, slow, 2000)
    assert max(slow.times) <= 2.4 * slow.seconds(1, 8)
    read(pace, fast, 20_000)
    fast.times.clear()
    read(pace, fast, 2000)
    assert max(fast.times) <= 3.0 * fast.seconds(1, 8)
    assert pace.limit(8, 1, BUDGET) > 30


def test_step_that_the_machine_held_up_changes_little():
    machine = Machine(0.02, 0.0005)
    pace = after_a_start(2.0, machine)
    read(pace, machine, 1000)
    before = pace._tokens_within(8, 1)
    pace.observe(0, 8, 5.0)
    pace.observe(before, 8, 5.0)
    assert 0.5 * before <= pace._tokens_within(8, 1) <= 1.5 * before
    read(pace, machine, 1000)
    assert 0.7 * before <= pace._tokens_within(8, 1) <= 1.5 * before


@pytest.mark.parametrize(("slowdown", "num_decodes"), [(0.0, 8), (2.0, 0)])
def test_steps_are_full_without_a_limit_and_without_streams(slowdown, num_decodes):
    pace = after_a_start(slowdown, Machine())
    assert pace.limit(num_decodes, 1, BUDGET) == BUDGET


def test_each_prompt_gets_on_however_slow_the_machine_is():
    machine = Machine(0.001, 10.0)
    counts = read(after_a_start(2.0, machine), machine, 1000)
    assert [count for count in counts if count] == [MIN_TOKENS] * 125


def longest_steps(slowdown, machine, num_waiting):
    """Return the seconds of the longest step of two streams beside prompts, and of all steps."""
    engine = Engine(
        budget=64, max_num_seqs=8, num_blocks=300, max_model_len=600, clock=machine.clock, max_prefill_slowdown=slowdown
    )
    compute, busy = engine.compute, []

    def compute_in_time(step):
        compute(step)
        num_decodes = int(step.counts.sum()) - step.num_prompt_tokens
        machine.run(step.num_prompt_tokens, num_decodes)
        if num_decodes:
            busy.append(machine.times[-1])

    engine.compute = compute_in_time
    for slot in range(2):
        engine.add(slot, num_prompt_tokens=4, max_tokens=500)
    for _ in range(30):
        engine.step()
    begun = machine.now
    for slot in range(2, 2 + num_waiting):
        engine.add(slot, num_prompt_tokens=400, max_tokens=1)
    while len(engine.ends) < num_waiting:
        engine.step()
    return max(busy), machine.now - begun, len(busy)


def test_scheduler_reads_a_long_prompt_at_the_pace_of_its_streams():
    whole, _, _ = longest_steps(0.0, Machine(0.02, 0.002), 1)
    paced, _, _ = longest_steps(2.0, Machine(0.02, 0.002), 1)
    assert whole > 0.12
    assert paced <= 0.048


def test_work_of_a_queue_of_prompts_takes_hardly_longer():
    _, whole, num_whole = longest_steps(0.0, Machine(0.02, 0.002), 20)
    _, paced, num_paced = longest_steps(2.0, Machine(0.02, 0.002), 20)
    # The streams go on meanwhile, so the time of each of their steps is work that was done.
    assert paced - whole <= 0.021 * (num_paced - num_whole) + 0.05 * whole
