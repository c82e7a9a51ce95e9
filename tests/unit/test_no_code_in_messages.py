"""No data becomes code: the product uses no pickle, no eval, and imports no name from a message."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BARRED_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "code", "runpy"}
BARRED_CALLS = {
    *("eval", "exec", "compile", "__import__", "import_module"),
    *("recv_pyobj", "send_pyobj", "run_path", "run_module", "exec_module"),
}
ALLOWED = {
    ("vllm_mp/__init__.py", "import_module"): "the names are this package's own, from a table in the same file",
    ("vllm_mp/cli/__init__.py", "import_module"): "the names are in a table in the same file",
    ("client/images/image_process.py", "import_module"): "the names are in a table in client/images/processor.py",
    ("core/models/__init__.py", "import_module"): "the names are in the table of native architectures",
    ("client/async_llm.py", "import_module"): "the names are in a table in the same file",
    ("core/torch_import/torch_library.py", "import_module"): "the names are in tables in the same file",
    ("kernels/flash.py", "import_module"): "the names are in a table in the same file",
    ("vllm_mp/as_vllm.py", "import_module"): "the names are this package's own, under another name",
    **dict.fromkeys(
        (("vllm_mp/as_vllm.py", use) for use in ("runpy", "run_module", "run_path")),
        "the user names the program on the command line",
    ),
    ("core/structured_output/llguidance_library.py", "compile"): "the method compiles a constraint to a grammar",
    ("core/structured_output/trial_compilation.py", "compile"): "the same method",
    ("core/structured_output/compiler.py", "compile"): "the same method",
    ("vllm_mp/testing/compiled_kernels.py", "compile"): "Triton compiles the kernels of this package",
    ("vllm_mp/testing/fake_cuda/launches.py", "import_module"): "the names are this package's own",
    ("client/answers/parser_registry.py", "exec_module"): "the operator names the file when the engine starts",
    (
        "core/worker/sampling/registered_processors.py",
        "import_module",
    ): "the operator names them when the engine starts",
}
"""Uses that no message can reach: (file, name) and the reason."""


def uses(tree):
    """Yield the barred names that a module imports or calls, also as methods; `model.eval()` is allowed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from {alias.name.partition(".")[0] for alias in node.names} & BARRED_MODULES
        elif isinstance(node, ast.ImportFrom):
            yield from {(node.module or "").partition(".")[0]} & BARRED_MODULES
            yield from {alias.name for alias in node.names} & BARRED_CALLS
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield from {node.func.id} & BARRED_CALLS
            elif isinstance(node.func, ast.Attribute):
                is_mode_of_module = node.func.attr == "eval" and not node.args and not node.keywords
                is_pattern = node.func.attr == "compile" and ast.unparse(node.func.value) == "re"
                is_torch_load = node.func.attr == "load" and ast.unparse(node.func.value) == "torch"
                if is_torch_load and "weights_only=True" not in map(ast.unparse, node.keywords):
                    yield "torch.load"
                if not is_mode_of_module and not is_pattern:
                    yield from {node.func.attr} & BARRED_CALLS
            if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                yield "allow_pickle"


NAMES = re.compile(rf"\b(?:{'|'.join(BARRED_MODULES | BARRED_CALLS | {'load', 'allow_pickle'})})\b")
"""Words without which a text has no use of a barred name."""


def found_in(text):
    return set(uses(ast.parse(text))) if NAMES.search(text) else set()


def test_no_module_turns_data_into_code():
    found = {}
    for folder in ("vllm_mp", "client", "core", "kernels"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            if not name.startswith(("vllm_mp/core/", "vllm_mp/client/", "vllm_mp/kernels/")):
                found |= {(name, use): file for use in found_in(file.read_text())}
    assert found.keys() == ALLOWED.keys()


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import marshal, os",
        "from importlib import import_module",
        "import importlib\nimportlib.import_module(name)",
        "eval(x)",
        "exec(x)",
        "compile(x, '', 'exec')",
        "__import__(x)",
        "socket.recv_pyobj()",
        "spec.loader.exec_module(module)",
        "builtins.eval(x)",
        "numpy.load(x, allow_pickle=True)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
    ],
)
def test_scan_finds_code_from_data(text):
    assert found_in(text)


@pytest.mark.parametrize(
    "text", ["model.eval()", "re.compile('x')", "import importlib.metadata", "torch.load(x, weights_only=True)"]
)
def test_scan_allows_harmless_calls(text):
    assert not found_in(text)
