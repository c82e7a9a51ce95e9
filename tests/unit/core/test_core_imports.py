"""What a template process imports, and in which order."""

import inspect
import subprocess
import sys
from importlib.machinery import ModuleSpec

from vllm_mp.core import core_imports

LIBRARIES_LATER_THAN_TORCHS = """
import importlib.machinery, threading
from vllm_mp.core.core_imports import import_core
from vllm_mp.core.torch_import import torch_library

created = None
import_first = torch_library._import_modules_with_libraries
create = importlib.machinery.ExtensionFileLoader.create_module

def note_begin():
    global created
    import_first()
    created = []

def note(loader, spec):
    if created is not None:
        created.append(spec.name)
    return create(loader, spec)

torch_library._import_modules_with_libraries = note_begin
importlib.machinery.ExtensionFileLoader.create_module = note
import_core()
print(threading.active_count(), *created[:created.index("torch._C")])
"""
RARE_PARTS = """
from vllm_mp.core.core_imports import import_core
from vllm_mp.core.torch_import.rare_parts_of_torch import _RARE_PARTS_OF_TORCH
from vllm_mp.machine.deferred_modules import load_deferred_modules
import_core()
import sys, types
import torch

def count_executed():
    return sum(type(sys.modules[name]) is types.ModuleType for name in _RARE_PARTS_OF_TORCH)

print(len(_RARE_PARTS_OF_TORCH) > 3, count_executed())
model = torch.nn.Linear(3, 2)
model(torch.ones(1, 3)).sum().backward()
print(count_executed())
load_deferred_modules()
print(count_executed() == len(_RARE_PARTS_OF_TORCH))
import torch.utils.data.dataloader
torch.export.export(model, (torch.ones(1, 3),))
print(torch.distributions.Normal(0.0, 1.0).mean.item(), torch.empty(2, device="meta").device)
"""


def _printed(program: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_no_import_waits_for_the_library_of_torch_and_no_thread_is_left():
    assert _printed(LIBRARIES_LATER_THAN_TORCHS) == ["1"]


def test_rare_parts_of_torch_are_executed_only_when_all_of_it_is_needed():
    assert _printed(RARE_PARTS) == ["True", "0", "0", "True", "0.0", "meta"]


def test_modules_that_are_found_by_name_are_the_usual_ones():
    things = [core_imports, core_imports.import_core, inspect.currentframe(), ModuleSpec]
    usual = [inspect.getmodule(thing) for thing in things]
    with core_imports._modules_found_by_name():
        assert [inspect.getmodule(thing) for thing in things] == usual
        assert inspect.getsource(core_imports.import_core).startswith("def import_core")
        assert inspect.getmodule(1) is None
    assert inspect.getmodule.__module__ == "inspect"
