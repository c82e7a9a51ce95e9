"""Output is held to its grammar in every step, whatever else happens to the request."""

import itertools
import types

import numpy as np
import pytest
from support.drafts import draft_known_answers
from support.local_engine import LocalEngine

from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.structured_output.compiler import NotCompiledError
from vllm_mp.core.structured_output.constrained_output import ConstrainedOutput
from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.requests.structured_outputs import Constraint
from vllm_mp.testing.random_models import CONFIGS, save_config

TEXTS = {
    60: b"</",
    61: b"end",
    62: b">",
    63: b">\n\n",
    64: b">{",
    65: b"{",
    66: b"</end> \n{{",
    67: b"> 2",
    68: b"\n",
    69: b"",
}
"""The texts of tokens; the others have texts of their own."""


class SequenceGrammar:
    """A grammar that no library compiles: it allows each of `sequences` of token ids, then the token `end` for ever."""

    def __init__(self, sequences, end=0):
        self.sequences = [list(sequence) for sequence in sequences]
        self.end = end

    def matcher(self):
        return SequenceMatcher(self)

    def bytes_of(self, tokens):
        return b"".join(TEXTS.get(token, b"<%d>" % token) for token in tokens)

    def tokens_of(self, text):
        return [next(token for token, of_token in TEXTS.items() if of_token == bytes([byte])) for byte in text]


class SequenceMatcher:
    def __init__(self, grammar):
        self.grammar = grammar
        self.read = []

    def allowed(self, read):
        going_on = {
            sequence[len(read)]
            for sequence in self.grammar.sequences
            if sequence[: len(read)] == read and len(sequence) > len(read)
        }
        complete = any(
            read[: len(s)] == s and set(read[len(s) :]) <= {self.grammar.end} for s in self.grammar.sequences
        )
        return going_on | ({self.grammar.end} if complete else set())

    def accept(self, tokens):
        for token in tokens:
            if token not in self.allowed(self.read):
                raise GrammarError(f"token {token} is forbidden after {self.read}")
            self.read.append(token)

    def fill(self, mask):
        mask[:] = 0
        for token in self.allowed(self.read):
            mask[token // 32] |= 1 << token % 32 if token % 32 < 31 else -(1 << 31)

    def fill_ahead(self, drafts, masks):
        read = list(self.read)
        for token, mask in zip(drafts, masks, strict=True):
            self.accept([token])
            self.fill(mask)
        self.read = read

    def num_allowed(self, tokens):
        read = list(self.read)
        return next((i for i, token in enumerate(tokens) if token not in self.allowed(read + tokens[:i])), len(tokens))

    def forced(self):
        run = []
        while len(allowed := self.allowed(self.read + run)) == 1 and allowed != {self.grammar.end}:
            run += allowed
        return run


class FailingGrammar(SequenceGrammar):
    """Fails when a mask is asked for after `num_tokens` tokens."""

    def __init__(self, sequences, num_tokens):
        super().__init__(sequences)
        self.num_tokens = num_tokens

    def matcher(self):
        matcher = super().matcher()
        fill = matcher.fill

        def fail_late(mask):
            if len(matcher.read) >= self.num_tokens:
                raise GrammarError("the grammar is too complex")
            fill(mask)

        matcher.fill = fail_late
        return matcher


def constrained(grammar=None, may_force=True, starts_after=(), reasoning_start=-1):
    """Return an output that must match `grammar`; None: which waits for its grammar."""
    constraint = Constraint("grammar", "a stand-in", starts_after=tuple(starts_after), reasoning_start=reasoning_start)
    output = ConstrainedOutput(constraint, may_force)
    if grammar is not None:
        output.begin(grammar)
    return output


FORKED = SequenceGrammar([[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 13], [14, 15]])
"""After 5 the tokens 6 and 7 are forced; then comes a choice, and after 8 a run of four more."""
LONG = SequenceGrammar([range(20, 44), range(50, 74)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_config(CONFIGS["llama"], tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=[False, True], ids=["sync", "overlap"])
def make(folder, request):
    return lambda **options: LocalEngine(
        folder, load_format="dummy", check_invariants=True, async_scheduling=request.param, **options
    )


def matches(grammar, tokens):
    grammar.matcher().accept(tokens)
    return True


def test_every_token_is_allowed_by_the_grammar_and_other_requests_are_not_touched(make):
    alone = make()
    alone.add(0, [1, 2, 3], 12)
    alone.run()
    engine = make()
    engine.add(0, [1, 2, 3], 12)
    for slot in range(1, 6):
        engine.add(slot, [slot, 9], 12, constrained=constrained(FORKED), temperature=1.0)
    engine.run()
    assert engine.tokens[0] == alone.tokens[0]
    assert all(matches(FORKED, engine.tokens[slot]) for slot in range(1, 6))
    assert len({tuple(engine.tokens[slot]) for slot in range(1, 6)}) > 1, "the draws choose among the sequences"


def test_forced_tokens_change_no_token_of_the_output(make):
    outputs = []
    for may_force in (True, False):
        engine = make()
        for slot in range(5):
            engine.add(slot, [slot, 9], 14, constrained=constrained(FORKED, may_force), temperature=1.0)
        engine.run()
        outputs.append(engine.tokens)
    assert outputs[0] == outputs[1]


def test_a_run_of_forced_tokens_is_computed_in_one_step_and_sent_at_once(make):
    steps = {}
    for may_force in (True, False):
        engine = make()
        engine.add(0, [1, 2], 24, constrained=constrained(SequenceGrammar([range(20, 44)]), may_force))
        lengths = []
        while engine.scheduler.has_work or engine.scheduler.pending_steps:
            engine.step()
            lengths.append(len(engine.tokens[0]))
        assert engine.tokens[0] == list(range(20, 44))
        assert engine.ends[0].reason == "length"
        steps[may_force] = engine.num_launched
    assert steps[True] <= 4 < 24 <= steps[False]


def test_steps_get_forced_tokens_only_up_to_the_number_that_is_cheap(make):
    engine = make()
    for slot in range(8):
        engine.add(slot, [1, 2], 24, constrained=constrained(SequenceGrammar([range(20, 44)])))
    sizes = []
    while engine.scheduler.has_work or engine.scheduler.pending_steps:
        step = engine.step()
        sizes += [] if step is None else [step.counts.sum()]
    assert all(engine.tokens[slot] == list(range(20, 44)) for slot in range(8))
    assert max(sizes) <= engine.config.scheduler_config.num_cheap_tokens == 32
    assert len(sizes) < 16


def test_a_forced_run_ends_before_stop_tokens_and_before_the_length(make):
    engine = make()
    engine.add(0, [1, 2], 24, constrained=constrained(SequenceGrammar([range(20, 44)])), stop_token_ids=[30])
    engine.add(1, [1, 2], 7, constrained=constrained(SequenceGrammar([range(20, 44)])))
    engine.run()
    assert (engine.tokens[0], engine.ends[0].reason, engine.ends[0].stop_reason) == ([*range(20, 31)], "stop", 30)
    assert (engine.tokens[1], engine.ends[1].reason) == ([*range(20, 27)], "length")


def test_the_constraint_begins_after_the_end_of_the_reasoning(make):
    free = make()
    free.add(0, [1, 2, 3], 30)
    free.run()
    thought = free.tokens[0]
    first = next(i for i in range(4, 30) if (thought[i - 1], thought[i]) not in itertools.pairwise(thought[:i]))
    end = thought[first - 1 : first + 1]
    engine = make()
    engine.add(0, [1, 2, 3], 30, constrained=constrained(FORKED, starts_after=end))
    engine.run()
    assert engine.tokens[0][: first + 1] == thought[: first + 1]
    assert matches(FORKED, engine.tokens[0][first + 1 :])


@pytest.mark.parametrize(
    ("thought", "read"),
    [
        ([1, 60, 61, 62], []),
        ([1, 60, 61, 63], []),
        ([1, 60, 61, 64], [65]),
        ([66], [65, 65]),
        ([60, 60, 61, 62], []),
        ([60, 1, 61, 62], None),
        ([67], None),
    ],
)
def test_reasoning_ends_with_its_text_whatever_tokens_it_has(thought, read):
    grammar = SequenceGrammar([[65, 65, 9, 9], [9, 9]])
    rest = [] if read is None else [9] if not read else [65, 9][len(read) - 1 :]
    for cut in range(len(thought) + 1):
        output = constrained(grammar, starts_after=[60, 61, 62])
        output.matcher_after(np.array(thought[:cut], np.int32))
        num_before = len(thought) if read is None else len(thought) - 1
        if cut < len(thought):
            assert output.num_allowed(np.array(thought[:cut], np.int32), [*thought[cut:]]) == num_before - cut
        matcher = output.matcher_after(np.array([*thought, *rest], np.int32))
        assert output.error is None
        assert (None if matcher is None else matcher.read) == (None if read is None else [*read, *rest])


@pytest.mark.parametrize(("end", "thought"), [([68, 68], [1, 68, 68]), ([69, 69], [1, 69])], ids=["blank", "no text"])
def test_reasoning_may_end_with_whitespace_or_with_tokens_without_text(end, thought):
    output = constrained(SequenceGrammar([[9]]), starts_after=end)
    assert output.matcher_after(np.array(thought[:-1], np.int32)) is None
    assert output.matcher_after(np.array([*thought, 9], np.int32)).read == [9]


def test_text_after_the_end_of_the_reasoning_must_match_the_grammar():
    output = constrained(SequenceGrammar([[9]]), starts_after=[60, 61, 62])
    assert output.matcher_after(np.array([60, 61, 64], np.int32)) is None
    assert "token 65 is forbidden" in output.error


def test_reasoning_that_may_be_left_out_begins_with_its_token_or_not_at_all(make):
    free = make()
    free.add(0, [1, 2, 3], 8)
    free.run()
    thought = free.tokens[0]
    start, end = thought[0], thought[4]
    assert end not in thought[:4]
    engine = make()
    engine.add(0, [1, 2, 3], 12, constrained=constrained(FORKED, starts_after=[end], reasoning_start=start))
    other = next(token for token in range(50, 97) if token not in thought)
    skips = constrained(FORKED, starts_after=[end], reasoning_start=other)
    engine.add(1, [1, 2, 3], 8, constrained=skips, logit_bias={other: -100.0})
    engine.run()
    assert engine.tokens[0][:5] == thought[:5]
    assert matches(FORKED, engine.tokens[0][5:])
    assert matches(FORKED, engine.tokens[1])


@pytest.mark.parametrize("num_received", [0, 1, 3, 5])
def test_a_request_that_another_core_began_continues_in_its_grammar(make, num_received):
    params = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2}
    engine = make()
    engine.add(0, [1, 2], 10, constrained=constrained(FORKED), **params)
    engine.run()
    successor = make()
    received = engine.tokens[0][:num_received]
    successor.add(0, [1, 2], 10, constrained=constrained(FORKED), output=received, **params)
    successor.run()
    assert received + successor.tokens[0] == engine.tokens[0]


@pytest.mark.parametrize("may_force", [True, False])
@pytest.mark.parametrize("starts_after", [(), (40,)])
def test_drafts_are_cut_where_the_grammar_forbids_them(folder, may_force, starts_after):
    def play(**options):
        engine = LocalEngine(folder, load_format="dummy", check_invariants=True, **options)
        if options:
            draft_known_answers(engine.scheduler, known, wrong_every=4)
        for slot in range(4):
            begun = constrained(FORKED if slot % 2 else LONG, may_force, starts_after)
            engine.add(slot, [slot, 9], 26, constrained=begun, temperature=1.0, logit_bias={40: 3.0})
        engine.run()
        return engine

    plain = play()
    known = [([slot, 9], plain.tokens[slot]) for slot in range(4)]
    drafted = play(speculative_config={"num_speculative_tokens": 5})
    assert drafted.tokens == plain.tokens
    assert drafted.ends == plain.ends
    counters = drafted.scheduler.drafting.counters
    assert counters.num_accepted_tokens > (2 if may_force and not starts_after else 8)
    if not starts_after:
        assert counters.num_accepted_tokens == counters.num_draft_tokens, "each wrong draft is forbidden"
        assert drafted.num_launched < plain.num_launched


def test_preempted_requests_continue_in_their_grammar(make):
    calm = make()
    for slot in range(4):
        calm.add(slot, [slot, 9], 26, constrained=constrained(LONG), temperature=1.0)
    calm.run()
    tight = make(kv_cache_memory_bytes=17 * 4 * calm.runner.memory.token_bytes())
    for slot in range(4):
        tight.add(slot, [slot, 9], 26, constrained=constrained(LONG), temperature=1.0)
    tight.run()
    assert tight.scheduler.num_preemptions
    assert tight.tokens == calm.tokens


def test_a_request_waits_for_its_grammar_while_others_run(make):
    engine = make()
    waiting = constrained()
    engine.add(0, [1, 2], 8, constrained=waiting)
    engine.add(1, [1, 2], 3)
    engine.add(2, [1, 2], 8, constrained=constrained())
    engine.run()
    assert (len(engine.tokens[1]), engine.tokens[0]) == (3, [])
    assert engine.scheduler.num_waiting == 2
    assert engine.scheduler.has_parked
    assert not engine.scheduler.has_work
    assert engine.scheduler.abort(0, 2).reason == "abort"
    assert engine.scheduler.note_compiled([(0, 0)], FORKED) == []
    engine.run()
    assert matches(FORKED, engine.tokens[0])
    assert engine.tokens[2] == []


def test_requests_whose_constraint_is_refused_end_with_the_error(make):
    engine = make()
    for slot in range(2):
        engine.add(slot, [1, 2], 8, constrained=constrained())
    ends = engine.scheduler.note_compiled([(0, 0), (0, 1)], GrammarError("at /items: no"))
    assert [(end.slot, end.reason, end.error, end.invalid_constraint) for _, end in ends] == [
        (slot, "error", "at /items: no", True) for slot in range(2)
    ]
    assert not engine.scheduler.num_waiting


def test_a_request_whose_constraint_cannot_be_compiled_now_is_not_called_invalid(make):
    engine = make()
    engine.add(0, [1, 2], 8, constrained=constrained())
    [(_, end)] = engine.scheduler.note_compiled([(0, 0)], NotCompiledError("no process can start"))
    assert (end.reason, end.invalid_constraint, end.interrupted) == ("error", False, True)


def test_the_compiler_is_told_when_a_request_ends_that_waits_for_its_grammar(make):
    engine = make()
    forgotten = []
    engine.scheduler.grammars = types.SimpleNamespace(forget=forgotten.append)
    engine.add(0, [1, 2], 8, constrained=constrained())
    engine.add(1, [1, 2], 2, constrained=constrained(FORKED))
    engine.run()
    assert forgotten == []
    engine.scheduler.drop_client(0)
    assert forgotten == [(0, 0)]


def test_held_requests_with_a_grammar_run_after_the_pause(make):
    engine = make()
    engine.scheduler.pause(freeze=False)
    engine.add(0, [1, 2], 4, constrained=constrained())
    engine.scheduler.note_compiled([(0, 0)], FORKED)
    engine.run()
    assert engine.tokens[0] == []
    engine.scheduler.resume()
    engine.run()
    assert matches(FORKED, engine.tokens[0])


def test_a_grammar_that_fails_ends_its_request_alone(make):
    engine = make()
    engine.add(0, [1, 2], 8, constrained=constrained(FailingGrammar([[5, 6, 7, 8]], 2), may_force=False))
    engine.add(1, [1, 2], 8, constrained=constrained(FORKED))
    engine.add(2, [1, 2], 8, constrained=constrained(FORKED), output=[5, 30])
    engine.run()
    assert (engine.tokens[0], engine.ends[0].reason) == ([5, 6], "error")
    assert engine.ends[0].error == "the grammar is too complex"
    assert engine.ends[2].error == "token 30 is forbidden after [5]"
    assert matches(FORKED, engine.tokens[1])


def test_aborted_request_leaves_its_step_before_the_step_is_sampled(make):
    engine = make()
    engine.add(0, [1, 2], 8, constrained=constrained(FORKED), presence_penalty=1.0, min_tokens=4, logprobs=1)
    engine.add(1, [1, 2], 8, constrained=constrained(FORKED))
    engine.step()
    engine.step()
    engine.scheduler.abort(0, 0)
    engine.run()
    assert matches(FORKED, engine.tokens[1])


def test_rows_without_a_grammar_cost_nothing(make):
    engine = make()
    engine.add(0, [1, 2], 4)
    engine.step()
    engine.add(1, [1, 2], 4, constrained=constrained(FORKED))
    while not engine.batch.is_constrained.any():
        engine.step()
    step = ScheduledStep.of(engine.batch, np.array([0]), np.array([1]), 1)
    assert engine.sampler.token_masks(step.rows, engine.batch.num_tokens[step.rows], 64) is None
