"""The stand-ins for a core's supervisor and connection have the names and signatures of the real classes."""

import inspect

import pytest
from support.stand_in_core import StandInConnection, StandInSupervisor

from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.cores.supervisor import CoreSupervisor

OWN = {"start", "core_of"}
"""Methods for tests."""
PAIRS = [(StandInConnection, CoreConnection), (StandInSupervisor, CoreSupervisor)]


@pytest.mark.parametrize(("stand_in", "real"), PAIRS)
def test_methods_of_a_stand_in_have_the_signatures_of_the_real_class(stand_in: type, real: type) -> None:
    methods = {name: value for name, value in vars(stand_in).items() if inspect.isfunction(value) and name[0] != "_"}
    for name in methods.keys() - OWN:
        assert inspect.signature(methods[name]) == inspect.signature(getattr(real, name)), name


@pytest.mark.parametrize(("stand_in", "real"), PAIRS)
def test_attributes_of_a_stand_in_are_those_of_the_real_class(stand_in: type, real: type) -> None:
    source = inspect.getsource(real)
    for name in stand_in.__annotations__:
        assert hasattr(real, name) or f"self.{name} = " in source or f"self.{name}: " in source, name
