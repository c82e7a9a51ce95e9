"""Errors can be sent to another process, and a failure shows its cause wherever an output is expected."""

import ast
import dataclasses
import importlib
import pickle
from pathlib import Path

import msgspec
import pytest

from vllm_mp.errors import BatchDeadError, EngineDeadError
from vllm_mp.outputs import PoolingRequestOutput, RequestFailure, RequestOutput, ScoringRequestOutput

ROOT = Path(__file__).parents[2]
ARGUMENTS = {
    "ApiError": (429, "full"),
    "BatchDeadError": ("the core died", [RequestFailure("1", EngineDeadError("the core died"))]),
    "ChatMessageError": ("wrong", "messages[0]"),
    "DiskFullError": (Path("folder/name"), "writing it"),
    "ImageSourceError": (2, "no image"),
    "_LostError": ("the actor died", True),
}
"""Arguments of errors that take more than a text."""


def _errors():
    """Yield the module and the name of every class of errors that has an `__init__`, and those of the public module."""
    for folder in ("client", "core", "vllm_mp"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(file.read_text())
            for node in ast.walk(tree):
                if not isinstance(node, ast.ClassDef) or not any(
                    ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases
                ):
                    continue
                module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removeprefix("vllm_mp.")
                if module == "errors" or any(getattr(each, "name", "") == "__init__" for each in node.body):
                    yield f"vllm_mp.{module}", node.name


@pytest.mark.parametrize(("module", "name"), list(_errors()))
def test_error_can_be_pickled(module, name):
    if module.startswith("vllm_mp.client.ray."):
        pytest.importorskip("ray")
    error = getattr(importlib.import_module(module), name)(*ARGUMENTS.get(name, ("a text",)))
    error.extra = 1
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args) == (str(error), error.args)
    assert {key: str(value) for key, value in vars(again).items()} == {k: str(v) for k, v in vars(error).items()}


def test_death_of_a_batch_keeps_its_outputs_when_it_is_pickled():
    error = BatchDeadError(*ARGUMENTS["BatchDeadError"])
    (failure,) = pickle.loads(pickle.dumps(error)).outputs
    assert (failure.request_id, type(failure.error)) == ("1", EngineDeadError)


def test_field_of_an_output_that_a_failure_lacks_raises_its_error():
    failure = RequestFailure("1", ValueError("the prompt is too long"))
    fields = {field.name for field in msgspec.structs.fields(RequestOutput)}
    for output in (PoolingRequestOutput, ScoringRequestOutput):
        fields |= {field.name for field in dataclasses.fields(output)}
    for name in fields - {"request_id", "finished"}:
        with pytest.raises(ValueError, match="the prompt is too long"):
            getattr(failure, name)
    assert not hasattr(failure, "nonsense")
