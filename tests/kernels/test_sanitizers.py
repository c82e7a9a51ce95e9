"""AddressSanitizer and UndefinedBehaviorSanitizer find no error in the C++ kernels.

The build `portable` and the build with the model of the tile instructions are compiled with both into a temporary
folder. Another process runs a selection of the tests of the kernels with them, which the first error ends.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUILDS = ("portable", "amx_model")
SUBJECTS = ("cpu_kernels", "cpu_blocks", "cpu_experts", "cpu_logits", "block_decoder", "mixture_decoder")
TESTS = [f"tests/kernels/test_{name}.py" for name in SUBJECTS]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler is installed"),
]

SANITIZERS = [
    # Code that is not optimized is compiled several times faster, and nothing is optimized away that has an error.
    *("-O0", "-g1", "-fPIC", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    # Checks of memory as calls rather than inline make the compiler several times faster.
    *("--param", "asan-instrumentation-with-call-threshold=0"),
]

# Puts the folder of the sanitized builds before the folder of the others, and keeps a sample of the tests.
PLUGIN = """
import os
import pytest

def pytest_configure():
    import vllm_mp.kernels.cpu
    vllm_mp.kernels.cpu.__path__.insert(0, os.path.dirname(__file__))

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    from support.item_sample import sample
    items[:] = sample(items)
"""


def compile_builds(set_up: dict[str, Any], folder: Path) -> None:
    include = f"-I{sysconfig.get_path('include')}"

    def compile_source(job: tuple[Path, str]) -> None:
        source, name = job
        flags = [*set_up["FLAGS"], *set_up["BUILDS"][name], *SANITIZERS, include]
        subprocess.run(["g++", *flags, "-c", source, "-o", folder / f"{name}-{source.stem}.o"], check=True)

    sources = sorted((ROOT / set_up["FOLDER"]).glob("*.cpp"))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_source, [(source, name) for source in sources for name in BUILDS]))
    for name in BUILDS:
        objects = sorted(folder.glob(f"{name}-*.o"))
        subprocess.run(["g++", "-shared", "-fopenmp", *SANITIZERS, *objects, "-o", folder / f"_{name}.so"], check=True)


def runtime(name: str) -> str:
    """Return the path of a library of the compiler."""
    return subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()


def test_sanitizers_find_no_error_in_the_kernels(set_up: dict[str, Any], tmp_path: Path) -> None:
    compile_builds(set_up, tmp_path)
    (tmp_path / "sanitized_builds.py").write_text(PLUGIN)
    environment = os.environ | {
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    options = ["-q", "--capture=sys", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "sanitized_builds"]
    # All builds are loaded in one process, because other tests do so too.
    command = [sys.executable, "-m", "pytest", *options, "-k", " or ".join(BUILDS), *TESTS]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[:8000]
