"""The compiler accepts the sources of builds that this processor cannot run, which `tools/setup-venv` leaves out."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_mp.machine.cpu_info import KERNEL_BUILDS, runnable_builds

OTHERS = [name for name in KERNEL_BUILDS if name not in runnable_builds()]


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler is installed")
@pytest.mark.parametrize("build", OTHERS)
def test_compiler_accepts_the_sources(build, set_up):
    if build not in set_up["BUILDS"]:
        pytest.skip("another architecture")
    command = ["g++", "-fsyntax-only", *set_up["FLAGS"], *set_up["BUILDS"][build]]

    def errors(source):
        path = f"{set_up['FOLDER']}/{source}.cpp"
        return subprocess.run([*command, path], capture_output=True, text=True, check=False).stderr

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        assert [*pool.map(errors, set_up["SOURCES"])] == [""] * len(set_up["SOURCES"])
