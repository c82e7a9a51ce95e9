"""Constraints are compiled beside the core's loop, and a hostile constraint fails alone."""

import json
import os
import select
import subprocess
import sys
import threading

import pytest

from vllm_mp.core.structured_output import compiler as compiler_module
from vllm_mp.core.structured_output.backends import TrialCompilation
from vllm_mp.core.structured_output.compiler import GrammarCompiler, is_suspicious
from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.core.structured_output.tokenizer import TokenizerSource
from vllm_mp.structured_outputs import Constraint

DEADLINE_S = 60


class StandInGrammar:
    num_bytes = 1000

    def matcher(self):
        raise AssertionError


class StandInCompilation:
    """Compiles when `release` is set; regular expressions "bad" are refused, and "other" is left to the other lane."""

    def __init__(self):
        self.release = threading.Event()
        self.release.set()
        self.compiled = []

    def load(self):
        pass

    def compile_plain(self, constraint):
        if constraint.text == "other":
            return None
        return self._compile(constraint)

    def compile_suspicious(self, constraint):
        self.release.wait(DEADLINE_S)
        return self._compile(constraint)

    def _compile(self, constraint):
        self.compiled.append(constraint.text)
        if constraint.text == "bad":
            raise GrammarError("it is bad")
        if constraint.text == "broken":
            raise KeyError("broken")
        return StandInGrammar()

    def stop(self):
        self.release.set()


@pytest.fixture
def compilation():
    return StandInCompilation()


@pytest.fixture
def compiler(compilation):
    compiler = GrammarCompiler(compilation)
    yield compiler
    compiler.close()


def results(compiler, count):
    """Return what `count` compilations give, by the text of their constraints."""
    ended = {}
    while len(ended) < count:
        assert select.select([compiler.fd], [], [], DEADLINE_S)[0], "no compilation ends"
        ended |= {key.text: result for key, result in compiler.take_compiled()}
    return ended


def test_a_constraint_is_compiled_once_and_then_at_hand(compiler, compilation):
    first = Constraint("regex", "a", starts_after=(5,))
    assert compiler.request(first) is None
    assert compiler.request(Constraint("regex", "a")) is None
    grammar = results(compiler, 1)["a"]
    assert compiler.request(first) is compiler.request(Constraint("regex", "a")) is grammar
    assert compiler.take_compiled() == []
    assert compilation.compiled == ["a"]


def test_a_refused_constraint_is_refused_again_without_being_compiled(compiler, compilation):
    compiler.request(Constraint("regex", "bad"))
    assert str(results(compiler, 1)["bad"]) == "it is bad"
    with pytest.raises(GrammarError, match="it is bad"):
        compiler.request(Constraint("regex", "bad"))
    assert compilation.compiled == ["bad"]


def test_an_unexpected_error_of_a_library_fails_its_constraint_alone(compiler):
    for text in ("broken", "good"):
        compiler.request(Constraint("regex", text))
    ended = results(compiler, 2)
    assert "KeyError" in str(ended["broken"])
    assert isinstance(ended["good"], StandInGrammar)


def test_a_plain_constraint_never_waits_for_a_suspicious_one(compiler, compilation):
    compilation.release.clear()
    compiler.request(Constraint("grammar", "slow"))
    compiler.request(Constraint("regex", "other"))
    compiler.request(Constraint("regex", "a"))
    assert list(results(compiler, 1)) == ["a"]
    compilation.release.set()
    assert list(results(compiler, 2)) == ["slow", "other"]


def test_too_many_waiting_constraints_are_refused(compiler, compilation, monkeypatch):
    monkeypatch.setattr(compiler_module, "_MAX_PENDING", 2)
    compilation.release.clear()
    for text in ("a", "b", "a"):
        compiler.request(Constraint("grammar", text))
    with pytest.raises(GrammarError, match="too many constraints are being compiled: the limit is 2"):
        compiler.request(Constraint("grammar", "c"))
    compilation.release.set()
    results(compiler, 2)
    assert compiler.request(Constraint("grammar", "c")) is None


@pytest.mark.parametrize("limit", [{"_MAX_GRAMMARS": 2}, {"_MAX_BYTES": 2500}])
def test_the_grammars_used_least_recently_are_forgotten(compiler, compilation, monkeypatch, limit):
    for name, value in limit.items():
        monkeypatch.setattr(compiler_module, name, value)
    for text in ("a", "b"):
        compiler.request(Constraint("regex", text))
        results(compiler, 1)
    compiler.request(Constraint("regex", "a"))
    compiler.request(Constraint("regex", "c"))
    results(compiler, 1)
    assert compiler.request(Constraint("regex", "a")) is not None
    assert compiler.request(Constraint("regex", "b")) is None


@pytest.fixture(scope="module")
def real(default_model):
    source = TokenizerSource(str(default_model), 49_152, [2])
    compiler = GrammarCompiler(TrialCompilation(source, "llguidance"))
    yield compiler
    compiler.close()


def chain(length):
    """Return a schema of definitions that refer to one another in a chain."""
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}})


@pytest.mark.extended
def test_hostile_constraints_fail_alone_and_say_why(real):
    hostile = {
        "stack": Constraint("json", chain(20_000)),
        "many": Constraint("json", json.dumps({"anyOf": [{"properties": {f"p{i}": {}}} for i in range(20_000)]})),
        "nested": Constraint("regex", "(" * 100_000 + "a" + ")" * 100_000),
        "bounds": Constraint(
            "json", '{"type":"integer","minimum":-9223372036854775808,"maximum":-9223372036854775808}'
        ),
        "exponent": Constraint("json", '{"type":"integer","exclusiveMinimum":-1e19,"exclusiveMaximum":-9.3e18}'),
        "ambiguous": Constraint("grammar", 'start: (("a"?){1,100000}){1,100000}'),
    }
    names = {constraint.text: name for name, constraint in hostile.items()}
    for constraint in hostile.values():
        assert is_suspicious(constraint)
        assert real.request(constraint) is None
    good = Constraint("grammar", 'start: "a" | "b" start')
    real.request(good)
    ended = results(real, len(hostile) + 1)
    assert not isinstance(ended.pop(good.text), GrammarError)
    messages = {names[text]: str(result) for text, result in ended.items() if isinstance(result, GrammarError)}
    assert messages.keys() == hostile.keys()
    assert "needs more stack than there is" in messages["stack"]
    for name in ("bounds", "exponent"):
        assert "bounds of numbers are near -2**63" in messages[name]
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
    assert not is_suspicious(constraint)
    real.request(constraint)
    assert not isinstance(results(real, 1)[constraint.text], GrammarError)


@pytest.mark.slow
def test_a_constraint_that_takes_too_long_or_too_much_memory_is_given_up(real):
    slow = Constraint("grammar", "start: A\nA: " + " & ".join(f"/(a|b)*b(a|b){{{i}}}/" for i in range(40)))
    large = Constraint("regex", "a?" * 20_000 + "a" * 20_000)
    for constraint in (slow, large):
        real.request(constraint)
    ended = results(real, 2)
    assert "compiling takes " in str(ended[slow.text])
    assert "compiling takes " in str(ended[large.text])


def test_the_process_of_trials_ends_with_the_compiler(default_model):
    compilation = TrialCompilation(TokenizerSource(str(default_model), 49_152, [2]), "llguidance")
    compiler = GrammarCompiler(compilation)
    compiler.request(Constraint("grammar", 'start: "a"'))
    results(compiler, 1)
    pid = compilation._trials._process.pid
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
from vllm_mp.core.structured_output.tokenizer import TokenizerSource
from vllm_mp.core.structured_output.trial_process import TrialProcess
from vllm_mp.structured_outputs import Constraint
trials = TrialProcess(TokenizerSource(sys.argv[1], 49152, [2]), "llguidance")
trials.run(Constraint("grammar", 'start: "a"'))
print(trials._process.pid, flush=True)
trials.run(Constraint("grammar", "start: A\\nA: " + " & ".join(f"/(a|b)*b(a|b){{{i}}}/" for i in range(40))))
"""
