"""No field of config.json that changes what transformers computes is ignored: it is served, or refused by its name."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.config_sweep import BASES, Change, Sweep, TransformersRefuses, changes, fields_of
from transformers.utils import logging as hub_logging

from vllm_mp.core.torch_threads import one_thread
from vllm_mp.model_config.families.registry import NATIVE_MODELS, read_architecture
from vllm_mp.model_config.families.with_images import read_qwen_vl, read_with_images
from vllm_mp.testing.random_models import NATIVE

FAMILIES = (*(name for name in NATIVE if name != "llama-llama3"), "bert", "roberta", "distilbert")
"""A base of each family."""
VARIANTS = ("phi3-long", "llama-yarn", "gemma3 with images", "bert for classes")
"""Bases of which fields count that are not read, or read otherwise, in those of `FAMILIES`."""
UNLIKE = ("mistral-windowed", "mixtral", "bert", *VARIANTS)
"""Bases of which all values are tried in each run; slow tests try all values of the others."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Leave out the warnings of transformers, which would take half of the time."""
    level = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.CRITICAL)
    with one_thread():
        yield
    hub_logging.set_verbosity(level)


def problems(name: str, folder: Path, *, one_each: bool) -> tuple[list[str], int]:
    """Return what is wrong with single fields of a base, and the number of values that transformers computes.

    With `one_each`, the base gets one value of each field of its own; else all values, also of fields of the others.
    """
    sweep, found, num_computed = Sweep(BASES[name], folder), [], 0
    fields = fields_of([BASES[name]] if one_each else BASES.values())
    for change in changes(BASES[name], fields, one_each=one_each):
        try:
            problem = sweep.difference(change)
        except TransformersRefuses:
            continue
        num_computed += 1
        if problem is not None:
            found.append(problem)
    return found, num_computed


@pytest.mark.parametrize("name", FAMILIES)
def test_each_field_is_served_as_by_transformers_or_refused_by_its_name(name: str, tmp_path: Path) -> None:
    found, num_computed = problems(name, tmp_path, one_each=True)
    assert not found
    assert num_computed > 30


@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    [*UNLIKE, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in UNLIKE)],
)
def test_each_value_of_each_field_is_served_as_by_transformers_or_refused_by_its_name(
    name: str, tmp_path: Path
) -> None:
    found, _ = problems(name, tmp_path, one_each=False)
    assert not found


def test_sweep_covers_every_family_and_finds_a_field_that_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These leave the fields to the reader of the text part.
    readers = {entry.read for entry in NATIVE_MODELS.values()} - {read_qwen_vl, read_with_images}
    assert {NATIVE_MODELS[read_architecture(BASES[name].fields()).name].read for name in FAMILIES} == readers

    def ignoring(config):  # type: ignore[no-untyped-def]
        return read_architecture({**config, "rms_norm_eps": 1e-6})

    monkeypatch.setattr("support.config_sweep.read_architecture", ignoring)
    problem = Sweep(BASES["llama"], tmp_path).difference(Change("rms_norm_eps", 0.1))
    assert problem is not None
    assert problem.startswith("rms_norm_eps=0.1 gives outputs that differ by")
