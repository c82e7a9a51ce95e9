"""The core's process starts before the client imports what an engine needs, and then nothing is missing."""

import builtins
import dis
import inspect
import json
import subprocess
import sys
import types

import pytest

from vllm_mp.client import async_llm

PROGRAM = """
import asyncio, json, sys
from vllm_mp import AsyncEngineArgs, AsyncLLM
from vllm_mp.core_link import early_template

def start(*arguments, **options):
    print(json.dumps(list(sys.modules)))
    raise OSError("no process")

early_template.start_template = start
args = AsyncEngineArgs(model="/nowhere")
try:
    asyncio.run(AsyncLLM.start(args)) if sys.argv[1] == "start" else AsyncLLM.from_engine_args(args)
except ValueError as error:
    print(json.dumps(str(error)))
"""
MOST_MODULES = 320
"""Modules of a process that starts a core, with 20 % of room; the whole client has more than 500."""


@pytest.mark.parametrize("entrance", ["start", "from_engine_args"])
def test_process_of_the_core_starts_before_the_client_imports_what_an_engine_needs(entrance):
    done = subprocess.run([sys.executable, "-c", PROGRAM, entrance], capture_output=True, text=True, check=True)
    modules, error = map(json.loads, done.stdout.splitlines())
    assert not {"numpy", "torch", "zmq", "vllm_mp.client.engine.engine", "vllm_mp.wire"} & set(modules)
    assert len(modules) < MOST_MODULES
    assert "'/nowhere': no such file or folder" in error


def codes_in(code):
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from codes_in(inner)


def test_methods_of_an_engine_find_all_names_that_were_imported_late():
    async_llm._import_rest()
    own = [value for value in vars(async_llm.AsyncLLM).values() if inspect.isroutine(value) or hasattr(value, "func")]
    functions = [inspect.unwrap(getattr(value, "__func__", getattr(value, "func", value))) for value in own]
    functions += [value.fget for value in vars(async_llm.AsyncLLM).values() if isinstance(value, property)]
    read = {
        instruction.argval
        for function in functions
        if getattr(function, "__module__", None) == async_llm.__name__
        for code in codes_in(function.__code__)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    }
    late = {name for names in async_llm._IMPORTED_BESIDE_CORE.values() for name in names}
    assert not read - vars(async_llm).keys() - vars(builtins).keys()
    assert late <= read
