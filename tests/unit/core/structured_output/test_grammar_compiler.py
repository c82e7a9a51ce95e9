"""Constraints are compiled beside the core's loop, and a hostile constraint fails alone."""

import itertools
import json
import os
import select
import subprocess
import sys
import threading
import time

import psutil
import pytest

from vllm_mp.core.structured_output import compiler as compiler_module
from vllm_mp.core.structured_output.compile_lanes import Waiter
from vllm_mp.core.structured_output.compiler import GrammarCompiler, TooManyConstraintsError, may_take_long
from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.core.structured_output.grammar_tokenizer import TokenizerSource
from vllm_mp.core.structured_output.llguidance_library import PreparedConstraint
from vllm_mp.core.structured_output.trial_compilation import TrialCompilation
from vllm_mp.core.structured_output.trial_process import TrialKilledError, TrialUnavailableError
from vllm_mp.core_link.core_status import OutsideTask
from vllm_mp.requests.structured_outputs import Constraint

DEADLINE_S = 60


class StandInGrammar:
    num_bytes = 1000

    def matcher(self):
        raise AssertionError


class StandInCompilation:
    """Tries constraints when `release`, or else `release_slow`, is set.

    Constraints "bad" are refused, "long" is left to the other lane, "later" fails to be tried `num_unavailable` times,
    and each trial of "killed" is killed.
    """

    def __init__(self):
        self.release, self.release_slow = threading.Event(), threading.Event()
        self.release.set()
        self.release_slow.set()
        self.tried = []
        self.cancelled = []
        self.num_unavailable = 0

    def load(self):
        pass

    def try_out(self, trial, is_quick):
        text = trial.constraint.text
        self.tried.append(text)
        (self.release if is_quick else self.release_slow).wait(DEADLINE_S)
        if text == "long" and is_quick:
            return None
        if text == "bad":
            raise GrammarError("it is bad")
        if text == "broken":
            raise KeyError("broken")
        if text == "later" and self.num_unavailable:
            self.num_unavailable -= 1
            raise TrialUnavailableError("no process can start")
        if text == "killed":
            raise TrialKilledError("it takes too much memory")
        return self.prepare(trial.constraint)

    def prepare(self, constraint):
        return PreparedConstraint(constraint.text)

    def cancel(self, is_quick):
        self.cancelled.append(is_quick)
        (self.release if is_quick else self.release_slow).set()

    def compile(self, prepared):
        return StandInGrammar()

    def stop(self):
        self.release.set()
        self.release_slow.set()


@pytest.fixture
def compilation():
    return StandInCompilation()


@pytest.fixture
def compiler(compilation):
    compiler = GrammarCompiler(compilation)
    yield compiler
    compiler.close()


slots = itertools.count()


def ask(compiler, constraint, slot=None, owner="a client", is_replay=False):
    """Request the grammar of a constraint for a new request."""
    task = OutsideTask(0, next(slots) if slot is None else slot, -1)
    return compiler.request(constraint, Waiter(task, owner, is_replay=is_replay))


def results(compiler, count):
    """Return what `count` compilations give, by the text of their constraints."""
    ended = {}
    while len(ended) < count:
        assert select.select([compiler.fd], [], [], DEADLINE_S)[0], "no compilation ends"
        ended |= {compiled.constraint.text: compiled.result for compiled in compiler.take_compiled()}
    return ended


def test_a_constraint_is_compiled_once_and_then_at_hand(compiler, compilation):
    first = Constraint("regex", "a", starts_after=(5,))
    assert ask(compiler, first) is None
    assert ask(compiler, Constraint("regex", "a")) is None
    grammar = results(compiler, 1)["a"]
    assert ask(compiler, first) is ask(compiler, Constraint("regex", "a")) is grammar
    assert compiler.take_compiled() == []
    assert compilation.tried == ["a"]


def test_what_a_core_has_compiled_is_compiled_by_the_next_core_without_a_trial(compilation):
    noted = []
    compiler = GrammarCompiler(compilation, note_tried=noted.append)
    for text in ("a", "bad", "b"):
        ask(compiler, Constraint("regex", text))
    ask(compiler, Constraint("grammar", "may take long"))
    results(compiler, 4)
    compiler.close()
    assert len(noted) == 2
    compilation.tried.clear()
    noted_again = []
    successor = GrammarCompiler(compilation, note_tried=noted_again.append)
    successor.inherit(noted)
    ask(successor, Constraint("json", "a"))
    results(successor, 1)
    assert compilation.tried == ["a"], "another kind of constraint with the same text is tried"
    ask(successor, Constraint("regex", "a", starts_after=(5,)))
    ask(successor, Constraint("regex", "b"))
    ended = results(successor, 2)
    successor.close()
    assert {type(result) for result in ended.values()} == {StandInGrammar}
    assert compilation.tried == ["a"]
    assert noted_again[:2] == noted, "the core after the next one knows them too"


def test_a_refused_constraint_is_refused_again_without_being_compiled(compiler, compilation):
    ask(compiler, Constraint("regex", "bad"))
    assert str(results(compiler, 1)["bad"]) == "it is bad"
    with pytest.raises(GrammarError, match="it is bad"):
        ask(compiler, Constraint("regex", "bad"))
    assert compilation.tried == ["bad"]


def test_an_unexpected_error_of_a_library_fails_its_constraint_alone(compiler):
    for text in ("broken", "good"):
        ask(compiler, Constraint("regex", text))
    ended = results(compiler, 2)
    assert "KeyError" in str(ended["broken"])
    assert isinstance(ended["good"], StandInGrammar)


def test_a_plain_constraint_never_waits_for_one_that_takes_long(compiler, compilation):
    compilation.release_slow.clear()
    ask(compiler, Constraint("grammar", "slow"))
    ask(compiler, Constraint("regex", "long"))
    ask(compiler, Constraint("regex", "a"))
    assert list(results(compiler, 1)) == ["a"]
    compilation.release_slow.set()
    assert list(results(compiler, 2)) == ["slow", "long"]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("_MAX_PENDING", "too many constraints are being compiled: the limit is 2"),
        ("_MAX_PENDING_OF_OWNER", "too many constraints are being compiled for this client: the limit is 2"),
    ],
)
def test_too_many_waiting_constraints_are_refused_except_those_of_replayed_requests(
    compiler, compilation, monkeypatch, limit, message
):
    monkeypatch.setattr(compiler_module, limit, 2)
    monkeypatch.setattr(compiler_module, "_SURE_PENDING", 1)
    compilation.release_slow.clear()
    for text in ("a", "b", "a"):
        ask(compiler, Constraint("grammar", text))
    with pytest.raises(TooManyConstraintsError, match=message):
        ask(compiler, Constraint("grammar", "c"))
    assert ask(compiler, Constraint("grammar", "d"), is_replay=True) is None
    assert ask(compiler, Constraint("grammar", "e"), owner="another client") is None
    compilation.release_slow.set()
    assert set(results(compiler, 4)) == {"a", "b", "d", "e"}
    assert ask(compiler, Constraint("grammar", "c")) is None


def test_owners_take_turns(compiler, compilation):
    compilation.release_slow.clear()
    ask(compiler, Constraint("grammar", "first"))
    while not compilation.tried:
        time.sleep(0.001)
    for owner, texts in (("one", "abcd"), ("two", "ecf"), ("three", "g")):
        for text in texts:
            ask(compiler, Constraint("grammar", text), owner=owner)
    compilation.release_slow.set()
    assert list(results(compiler, 8)) == ["first", *"aegbcdf"]


def test_a_compilation_ends_with_the_last_request_that_waits_for_it(compiler, compilation):
    compilation.release_slow.clear()
    for slot, text in enumerate(["running", "queued", "queued", "shared", "shared"], 100):
        ask(compiler, Constraint("grammar", text), slot, owner=slot)
        while not compilation.tried:
            time.sleep(0.001)
    for slot in (101, 102, 103):
        compiler.forget((0, slot))
    assert compilation.cancelled == []
    compiler.forget((0, 100))
    assert compilation.cancelled == [False], "the trial that runs is ended"
    assert list(results(compiler, 1)) == ["shared"]
    assert compilation.tried == ["running", "shared"]
    assert compiler.take_compiled() == []
    assert (compiler._jobs, compiler._job_of, dict(compiler._jobs_of)) == ({}, {}, {})


def test_a_constraint_of_a_replayed_request_waits_until_it_can_be_tried(compiler, compilation, monkeypatch):
    monkeypatch.setattr(compiler_module, "_RETRY_S", 0.001)
    compilation.num_unavailable = 1
    ask(compiler, Constraint("regex", "later"))
    refusal = str(results(compiler, 1)["later"])
    assert "cannot be compiled now: no process can start; send the request again later" in refusal
    compilation.num_unavailable = 3
    ask(compiler, Constraint("regex", "later"), is_replay=True)
    assert isinstance(results(compiler, 1)["later"], StandInGrammar)


def test_constraint_of_a_replayed_request_whose_trials_are_killed_is_refused_in_the_end(
    compiler, compilation, monkeypatch
):
    monkeypatch.setattr(compiler_module, "_RETRY_S", 0.001)
    ask(compiler, Constraint("regex", "killed"), is_replay=True)
    assert str(results(compiler, 1)["killed"]) == "it takes too much memory"
    assert compilation.tried == 5 * ["killed"]


@pytest.mark.parametrize("limit", [{"_MAX_GRAMMARS": 2}, {"_MAX_BYTES": 2500}])
def test_the_grammars_used_least_recently_are_forgotten(compiler, compilation, monkeypatch, limit):
    for name, value in limit.items():
        monkeypatch.setattr(compiler_module, name, value)
    for text in ("a", "b"):
        ask(compiler, Constraint("regex", text))
        results(compiler, 1)
    ask(compiler, Constraint("regex", "a"))
    ask(compiler, Constraint("regex", "c"))
    results(compiler, 1)
    assert ask(compiler, Constraint("regex", "a")) is not None
    assert ask(compiler, Constraint("regex", "b")) is None


@pytest.fixture(scope="module")
def real(default_model):
    source = TokenizerSource(str(default_model), 49_152, [2])
    compiler = GrammarCompiler(TrialCompilation(source))
    yield compiler
    compiler.close()


def chain(length):
    """Return a schema of definitions that refer to one another in a chain."""
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}})


def large_schema(num_properties):
    """Return a schema that takes some tenths of a second to compile."""
    return json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(num_properties)}})


def child_of(process):
    """Wait for the fork of the process of trials in which a constraint is compiled, and return it."""
    while not (children := psutil.Process(process.pid).children()):
        time.sleep(0.001)
    return children[0]


@pytest.mark.extended
def test_hostile_constraints_fail_alone_and_say_why(real):
    hostile = {
        "stack": Constraint("json", chain(20_000)),
        "many": Constraint("json", json.dumps({"anyOf": [{"properties": {f"p{i}": {}}} for i in range(20_000)]})),
        "nested": Constraint("regex", "(" * 100_000 + "a" + ")" * 100_000),
        "ambiguous": Constraint("grammar", 'start: (("a"?){1,100000}){1,100000}'),
    }
    names = {constraint.text: name for name, constraint in hostile.items()}
    for constraint in hostile.values():
        assert ask(real, constraint) is None
    good = Constraint("grammar", 'start: "a" | "b" start')
    ask(real, good)
    ended = results(real, len(hostile) + 1)
    assert not isinstance(ended.pop(good.text), GrammarError)
    messages = {names[text]: str(result) for text, result in ended.items() if isinstance(result, GrammarError)}
    assert messages.keys() == hostile.keys()
    assert "needs more stack than there is" in messages["stack"]
    assert "too large" in messages["many"]
    assert all(len(message) < 1200 for message in messages.values())


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json", '{"type":"array","minItems":1000000000,"items":{"type":"array","minItems":1000000000}}'),
        Constraint("json", '{"type":"string","minLength":1000000000}'),
        Constraint("regex", "(((a{1,1000}){1,1000}){1,1000}b|c)*"),
        Constraint("regex", "(a|b)*a(a|b){25}"),
        Constraint("json", '{"anyOf":[{"$ref":"#"},{"type":"array","items":{"$ref":"#"}},{"type":"null"}]}'),
    ],
    ids=lambda constraint: constraint.text,
)
def test_short_constraints_with_huge_counts_and_recursion_are_compiled_at_once(real, constraint):
    assert not may_take_long(constraint)
    ask(real, constraint)
    assert not isinstance(results(real, 1)[constraint.text], GrammarError)


@pytest.mark.slow
def test_a_constraint_that_takes_too_long_or_too_much_memory_is_given_up(real):
    slow = Constraint("grammar", "start: A\nA: " + " & ".join(f"/(a|b)*b(a|b){{{i}}}/" for i in range(40)))
    large = Constraint("regex", "a?" * 20_000 + "a" * 20_000)
    for constraint in (slow, large):
        ask(real, constraint)
    ended = results(real, 2)
    assert "compiling takes " in str(ended[slow.text])
    assert "compiling takes " in str(ended[large.text])


SLOW_GRAMMAR = "start: A\nA: " + " & ".join(f"/(a|b)*b(a|b){{{i}}}/" for i in range(41))
BOUNDS = (
    '{"type":"integer","minimum":-9223372036854775808,"maximum":-9223372036854775808}',
    '{"type":"integer","exclusiveMinimum":-1e19,"exclusiveMaximum":-9.3e18}',
)


def test_a_trial_that_crashes_costs_the_next_one_no_start(real):
    ask(real, Constraint("grammar", 'start: "w"'))
    results(real, 1)
    process = real._compilation._slow_trials._process
    ask(real, Constraint("json", chain(20_001)))
    [refusal] = results(real, 1).values()
    assert "compiling crashes the library" in str(refusal)
    ask(real, Constraint("grammar", 'start: "z"'))
    assert not isinstance(results(real, 1)['start: "z"'], GrammarError)
    assert real._compilation._slow_trials._process is process
    assert process.poll() is None


@pytest.mark.parametrize("schema", BOUNDS)
def test_bounds_at_which_a_library_may_crash_do_not_end_the_process_of_trials(real, schema):
    ask(real, Constraint("json", schema))
    assert list(results(real, 1)) == [schema]
    assert real._compilation._quick_trials._process.poll() is None


def test_a_trial_ends_at_once_when_its_request_does(real):
    ask(real, Constraint("grammar", 'start: "x"'))
    results(real, 1)
    process = real._compilation._slow_trials._process
    slow = Constraint("grammar", SLOW_GRAMMAR)
    ask(real, slow, 10_000)
    child_of(process)
    real.forget((0, 10_000))
    ask(real, Constraint("grammar", 'start: "y"'))
    began = time.monotonic()
    assert list(results(real, 1)) == ['start: "y"']
    assert time.monotonic() - began < 2, "the trial of 4 s goes on"
    assert process.poll() is None


def test_trial_that_is_needed_goes_on_when_the_end_of_an_earlier_one_comes_late(real):
    ask(real, Constraint("grammar", 'start: "v"'))
    results(real, 1)
    process = real._compilation._slow_trials._process
    needed = Constraint("json", large_schema(600))
    ask(real, needed)
    child_of(process)
    real._compilation.cancel(is_quick=False)
    assert not isinstance(results(real, 1)[needed.text], GrammarError)


@pytest.mark.parametrize("is_replay", [True, False])
def test_only_the_constraint_of_a_replayed_request_is_tried_again_if_its_trial_is_killed(real, is_replay):
    ask(real, Constraint("grammar", f'start: "u{is_replay}"'))
    results(real, 1)
    constraint = Constraint("json", large_schema(601 + is_replay))
    ask(real, constraint, is_replay=is_replay)
    child_of(real._compilation._slow_trials._process).kill()
    assert isinstance(results(real, 1)[constraint.text], GrammarError) != is_replay


def test_the_process_of_trials_ends_with_the_compiler(default_model):
    compilation = TrialCompilation(TokenizerSource(str(default_model), 49_152, [2]))
    compiler = GrammarCompiler(compilation)
    ask(compiler, Constraint("grammar", 'start: "a"'))
    results(compiler, 1)
    pid = compilation._slow_trials._process.pid
    assert os.path.exists(f"/proc/{pid}")
    compiler.close()
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.slow
def test_the_process_of_trials_ends_at_once_when_the_core_is_killed(default_model):
    core = subprocess.Popen([sys.executable, "-c", KILLED_CORE, str(default_model)], stdout=subprocess.PIPE, text=True)
    with os.fdopen(os.pidfd_open(int(core.stdout.readline()))) as trial:
        core.kill()
        core.communicate()
        assert select.select([trial], [], [], 2)[0], "the process goes on compiling"


KILLED_CORE = """
import sys
from vllm_mp.core.structured_output.grammar_tokenizer import TokenizerSource
from vllm_mp.core.structured_output.trial_process import SLOW, TrialProcess
from vllm_mp.requests.structured_outputs import Constraint
trials = TrialProcess(TokenizerSource(sys.argv[1], 49152, [2]), SLOW)
trials.run(Constraint("grammar", 'start: "a"'))
print(trials._process.pid, flush=True)
trials.run(Constraint("grammar", "start: A\\nA: " + " & ".join(f"/(a|b)*b(a|b){{{i}}}/" for i in range(40))))
"""
