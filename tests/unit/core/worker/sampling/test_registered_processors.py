"""Registered logits processors see a batch of their own, and a failure costs no other request anything."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.logits_processors import CountUp, Narrow, Target

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.logits_processors import LogitsProcessors
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.worker.sampling.registered_processors import RegisteredProcessors
from vllm_mp.core.worker.sampling.sampler import NO_TOKEN, Sampler
from vllm_mp.logits_processor import BatchUpdate, MoveDirectionality, process_dict_updates
from vllm_mp.requests.processor_registration import as_specs, import_folders, registered
from vllm_mp.requests.sampling_params import SamplingParams

VOCAB = 24
CPU = torch.device("cpu")
MODULE = "support.logits_processors"
slots = itertools.count()


def load(*specs):
    model = SimpleNamespace(
        logits_processors=specs, logits_processor_folders=import_folders(specs), get_vocab_size=lambda: VOCAB
    )
    return RegisteredProcessors(SimpleNamespace(model_config=model), CPU)


class Rows:
    """A batch whose requests have registered processors, and its sampler."""

    def __init__(self, *specs):
        self.processors = load(*specs)
        self.batch = Batch(16, 200, 16, [])
        self.sampler = Sampler(self.batch, CPU, self.processors)

    def add(self, prompt=(1, 2), output=(), **params):
        made = SamplingParams(**{"temperature": 0, **params})
        slot = next(slots)
        tokens = np.array([*prompt, *output], np.int32)
        own = LogitsProcessors.from_params(made, [])
        request = Request(0, slot, str(slot), made, tokens, len(prompt), 200, (0, slot), logits_processors=own)
        self.processors.enter(request)
        self.batch.add(request, np.array([1], np.int32))
        return request

    def sample(self, logits=None, rows=None):
        """Sample a token for each of `rows`, and add it to the row."""
        rows = self.batch.order if rows is None else np.array(rows)
        logits = torch.zeros(len(rows), VOCAB) if logits is None else logits
        tokens = self.sampler.sample(logits.clone(), rows)
        self.batch.token_ids[rows, self.batch.num_tokens[rows]] = tokens
        self.batch.num_tokens[rows] += 1
        return tokens.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_state_follows_requests_that_come_go_and_pause(seed):
    chance = random.Random(seed)
    rows = Rows(f"{MODULE}:Target", f"count={MODULE}:CountUp")
    live = {}
    for _ in range(40):
        if len(live) < 12 and chance.random() < 0.5:
            kind, start = chance.choice(["target", "count", "plain"]), chance.randrange(VOCAB)
            params = {
                "target": {"extra_args": {"target": start}},
                "count": {"logits_processors": ["count"], "extra_args": {"step": 5}},
                "plain": {},
            }[kind]
            live[rows.add(prompt=(7, start), **params)] = kind
        for request in [request for request in live if chance.random() < 0.1]:
            del live[request]
            rows.batch.remove(request.row)
        for request in [request for request in live if chance.random() < 0.05]:
            rows.batch.remove(request.row)  # preempted
            rows.batch.add(request, np.array([1], np.int32))
        chosen = [row for row in rows.batch.order.tolist() if chance.random() < 0.8]
        if not chosen:
            continue
        expected = []
        for row in chosen:
            request = rows.batch.request(row)
            start, count = int(request.tokens[1]), int(rows.batch.num_tokens[row]) - 2
            expected.append({"target": start, "count": (start + count + 5) % VOCAB, "plain": 0}[live[request]])
        assert rows.sample(rows=chosen) == expected


def test_update_tells_what_left_before_what_moved_and_gives_places_of_the_gone_to_the_new():
    rows = Rows(f"{MODULE}:Target")
    processor = rows.processors._processors[0]
    first = [rows.add(extra_args={"target": token}) for token in range(5)]
    rows.sample()
    for request in (first[0], first[1], first[4]):
        rows.batch.remove(request.row)
    new = rows.add(extra_args={"target": 9})
    assert processor._update({request.processed: 0 for request in (*first[2:4], new)}) == BatchUpdate(
        batch_size=3,
        removed=[1, 4],
        added=[(0, new.params, None, [])],
        moved=[(3, 1, MoveDirectionality.UNIDIRECTIONAL)],
    )
    assert processor._members == [new.processed, first[3].processed, first[2].processed]
    assert processor._update({request.processed: 0 for request in (*first[2:4], new)}) is None


def test_dict_entries_follow_moves_and_swaps():
    entries = {0: "a", 1: "b", 2: "c"}
    update = SimpleNamespace(
        added=[(3, SamplingParams(), None, []), (1, SamplingParams(), [5], [])],
        removed=[0],
        moved=[(3, 0, MoveDirectionality.UNIDIRECTIONAL), (0, 2, MoveDirectionality.SWAP)],
    )
    assert process_dict_updates(entries, update, lambda params, prompt, output: "new" if prompt is None else None)
    assert entries == {0: "c", 2: "new"}
    assert not process_dict_updates(entries, None, None)


def test_processors_work_between_the_biases_and_the_penalties():
    rows = Rows(f"{MODULE}:Target")
    rows.add(logit_bias={7: 50.0}, extra_args={"target": 4})
    rows.add(prompt=(1,), output=(4,), presence_penalty=2.0, frequency_penalty=2.0)
    logits = torch.zeros(2, VOCAB)
    logits[1, 4] = 3.0
    assert rows.sample(logits) == [4, 0]


def test_processors_that_keep_the_argmax_see_random_rows_alone_after_their_temperature():
    rows = Rows(f"narrow={MODULE}:Narrow")
    Narrow.seen.clear()
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    for params in ({"temperature": 2.0, "seed": 3}, {"temperature": 0}):
        rows.add(logits_processors=["narrow"], **params)
    rows.add(temperature=2.0, seed=4)
    plain = Rows(f"narrow={MODULE}:Narrow")
    for params in ({"temperature": 2.0, "seed": 3, "top_k": 2}, {"temperature": 0}, {"temperature": 2.0, "seed": 4}):
        plain.add(**params)
    assert rows.sample(logits) == plain.sample(logits)
    assert [list(seen.shape) for seen in Narrow.seen] == [[1, VOCAB]]
    torch.testing.assert_close(Narrow.seen[0].softmax(-1), (logits[:1] / 2.0).softmax(-1))
    cold = Rows(f"narrow={MODULE}:Narrow")
    cold.add(logits_processors=["narrow"], temperature=1e-40, seed=1)
    assert cold.sample(logits[:1]) == [int(logits[0].argmax())]


@pytest.mark.parametrize("fault", ["raise", "update", "shape", "type", "nan", "inf"])
def test_fault_fails_its_request_alone(fault):
    rows = Rows(f"{MODULE}:Faulty", f"count={MODULE}:CountUp")
    logits = torch.eye(VOCAB)[[20, 21, 22, 23]]
    spared = [rows.add(prompt=(token,), logits_processors=["count"]) for token in (3, 8)]
    rows.sample(logits[:2])
    bad = rows.add(extra_args={"fault": fault})
    later = rows.add()
    assert rows.sample(logits) == [4, 9, NO_TOKEN, 23]
    assert "logits processor 'Faulty'" in bad.processed.error
    why = {"raise": "a fault in the step", "update": "a fault in the update", "shape": r"[1, 23]", "type": "list"}
    assert why.get(fault, "not finite") in bad.processed.error
    rows.batch.remove(bad.row)
    assert rows.sample(logits[:3]) == [5, 10, 22]
    assert not any(request.processed.error for request in (*spared, later))


def test_two_faults_in_a_step_are_told_apart():
    rows = Rows(f"{MODULE}:Faulty")
    bad = [rows.add(extra_args={"fault": fault}) for fault in ("nan", "raise")]
    assert rows.sample() == [NO_TOKEN, NO_TOKEN]
    assert "not finite" in bad[0].processed.error
    assert "a fault in the step" in bad[1].processed.error


def test_faults_of_the_model_are_not_blamed_on_processors():
    rows = Rows(f"{MODULE}:Target")
    request = rows.add()
    assert rows.sample(torch.full((1, VOCAB), torch.nan)) == [NO_TOKEN]
    assert request.processed.error is None


def test_request_with_wrong_arguments_is_refused():
    rows = Rows(f"{MODULE}:Target")
    with pytest.raises(ValueError, match="logits processor 'Target' refuses the request: target must be a token id"):
        rows.add(extra_args={"target": "x"})
    assert len(rows.batch) == 0


def test_requests_without_processors_take_the_path_of_engines_without_any():
    rows = Rows(f"count={MODULE}:CountUp")
    request = rows.add()
    assert request.processed is None
    assert rows.sampler.is_argmax(rows.batch.order)
    assert not rows.batch.reads_output.any()
    rows.add(logits_processors=["count"])
    assert not rows.sampler.is_argmax(rows.batch.order)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (f"{MODULE}:Absent", "cannot be loaded.*Absent"),
        ("no_such_module:X", "no_such_module:X cannot be loaded.*PYTHONPATH or beside"),
        ("no_such_entry_point", r"cannot be loaded.*group vllm\.logits_processors: none"),
        ("builtins:dict", "is not a logits processor, a class with apply"),
        (f"{MODULE}:process_dict_updates", "is not a logits processor"),
        (f"{MODULE}:Broken", r"cannot be constructed \(OSError\('no table'\)\)"),
    ],
)
def test_class_that_cannot_be_loaded_is_named(spec, why):
    with pytest.raises(ValueError, match=why):
        load(spec)


def test_registrations_are_read_from_text_and_classes():
    specs = as_specs([CountUp, f"mine={MODULE}:Target", "entry.point-1"])
    assert [tuple(registration) for registration in registered(specs)] == [
        ("CountUp", f"{MODULE}:CountUp", False),
        ("mine", f"{MODULE}:Target", True),
        ("entry.point-1", "entry.point-1", False),
    ]
    assert AsyncEngineArgs(logits_processors=[Target]).logits_processors == (f"{MODULE}:Target",)


@pytest.mark.parametrize(
    ("given", "kind", "why"),
    [
        (["a b"], ValueError, "'module:Class' or names of entry points.*got 'a b'"),
        ([f"{MODULE}:Target", f"{MODULE}:Target"], ValueError, "registers 'Target' twice.*'other_name="),
        ([lambda logits: logits], TypeError, r"list or tuple of strings and classes, got \[<function"),
        ("Target", TypeError, "must be a list or tuple"),
        ([type("Here", (), {"__module__": "__main__"})], ValueError, "no code travels to it; move the class"),
        ([type("Here", (), {"__qualname__": "f.<locals>.Here"})], ValueError, "move the class to the top of a module"),
    ],
)
def test_other_registrations_are_refused(given, kind, why):
    with pytest.raises(kind, match=why):
        AsyncEngineArgs(logits_processors=given)
