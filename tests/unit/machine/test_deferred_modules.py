"""Modules that are executed when they are first used."""

import subprocess
import sys

PROGRAM = """
import sys
from vllm_mp.machine.deferred_modules import defer_modules, load_deferred_modules
defer_modules(["package.first", "package.second", "package.absent"])
import package
print("imported")
package.first.VALUE
print("used")
load_deferred_modules()
load_deferred_modules()
print("loaded")
"""


def test_deferred_modules_are_executed_when_they_are_used_or_when_all_are_loaded(tmp_path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    names = ("first", "second", "third")
    (package / "__init__.py").write_text("".join(f"from package import {name}\n" for name in names))
    for name in names:
        (package / f"{name}.py").write_text(f"VALUE = 1\nprint('{name}')\n")
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.split() == ["third", "imported", "first", "used", "second", "loaded"], found.stderr
