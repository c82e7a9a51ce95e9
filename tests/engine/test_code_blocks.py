"""The code blocks of the README and of docs run, in the order of their page, and do what they say."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.code_blocks import PAGES, ROOT, blocks_of, compiled, provided, run_python, run_script
from support.server_process import ServedModel, served
from support.shell_blocks import Shell

import vllm_mp
from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm_mp.keys.operator_key import ensure_operator_key
from vllm_mp.model_store import DEFAULT_MODEL
from vllm_mp.testing.adapters import adapter_tensors, save_adapter
from vllm_mp.testing.engines import standalone_core

pytestmark = pytest.mark.usefixtures("forked_programs")

_RUN = ("bash", "python")
_STARTS_ENGINES = (
    "docs/operating/",
    "docs/using/batch.md",
    "docs/using/loggers.md",
    "docs/using/lora.md",
    "docs/using/recovery.md",
    "docs/using/server.md",
)
"""Pages whose commands and programs start engines and servers of their own, which takes long."""


def _tested_pages() -> Iterator[Any]:
    """Yield the pages that have blocks to run, as parameters of a test."""
    for page in PAGES:
        if any(block.language in _RUN for block in blocks_of(page)):
            name = str(page.relative_to(ROOT))
            yield pytest.param(page, id=name, marks=[pytest.mark.slow] if name.startswith(_STARTS_ENGINES) else [])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="docs-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def model(small_model, default_model, folder) -> Path:
    """A small model with the default model's chat template."""
    path = folder / "model"
    shutil.copytree(small_model, path)
    shutil.copy(default_model / "chat_template.jinja", path)
    return path


@pytest.fixture(scope="module")
def server(model, folder) -> Iterator[ServedModel]:
    """A server of a small model under the name of the default model, ready."""
    name = ("--served-model-name", DEFAULT_MODEL, "--max-model-len", "1024")
    with served(model, folder, *name, TMPDIR=str(folder)) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(scope="module")
def core(model, folder) -> Iterator[str]:
    """The address of a stand-alone core of a small model with operators."""
    address = f"ipc://{folder}/core.sock"
    ensure_operator_key(folder / "operators")
    with standalone_core(model, address, "--operator-key-file", str(folder / "operators")):
        yield address


@pytest.fixture
def llm(core, folder) -> AsyncLLM:
    """An engine, which the test of the page shuts down."""
    return AsyncLLM.connect(core, operator_key_file=str(folder / "operators"), timeout=120)


@pytest.fixture(scope="module")
def adapters(model, folder) -> Path:
    """A folder with the adapters `sql` and `law` for the small model."""
    architecture = AsyncEngineArgs(model=str(model)).create_engine_config().model_config.architecture
    for seed, name in enumerate(("sql", "law")):
        save_adapter(folder / "adapters" / name, adapter_tensors(architecture, 8, seed=seed))
    return folder / "adapters"


@pytest.fixture
def prompts() -> list[str]:
    return ["Once upon a time", "The capital of France is"]


@pytest.fixture
def params() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=4)


@pytest.mark.parametrize("page", list(_tested_pages()))
def test_code_blocks_of_a_page_run(page, model, request):
    def server() -> ServedModel:
        return request.getfixturevalue("server")

    names = {name: getattr(vllm_mp, name) for name in vllm_mp.__all__} | {"__name__": "__main__"}
    with (
        tempfile.TemporaryDirectory(prefix="docs-") as folder,
        contextlib.closing(Shell(Path(folder), model, server)) as shell,
        asyncio.Runner() as runner,
        _ended(names),
    ):
        for block in blocks_of(page):
            if block.language == "bash":
                shell.run(block)
            elif block.is_script:
                run_script(block, Path(folder))
            elif block.language == "python":
                names |= provided(block, request.getfixturevalue)
                code = compiled(block, shell.replaced)
                with contextlib.chdir(folder):
                    run_python(code, names, runner)


@contextlib.contextmanager
def _ended(names: dict[str, Any]) -> Iterator[None]:
    """Shut down the engines that blocks have left among their names."""
    try:
        yield
    finally:
        for value in names.values():
            if isinstance(value, AsyncLLM):
                value.shutdown()


def test_readme_has_a_script():
    assert any(block.is_script for block in blocks_of(ROOT / "README.md"))
