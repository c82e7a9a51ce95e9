"""Private copies of the repository, in which mutations are applied and tests run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from vllm_mp.testing.mutations.mutation import Mutation

_SOURCES = ("vllm_mp", "client", "core", "kernels")


class Tree:
    """A private copy of the repository, complete with what was compiled for it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def copy_of(cls, source: Path, target: Path) -> "Tree":
        """Copy the working tree of the repository `source` to `target`, which must not exist.

        The copy has the files that git tracks, new files that git does not ignore, and compiled modules.
        """
        command = ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        files = [source / name for name in dict.fromkeys(listed) if name]
        files += [file for folder in {file.parent for file in files} for file in folder.glob("*.so")]
        for file in files:
            if file.is_symlink() or file.exists():  # git also lists files that were removed
                copied = target / file.relative_to(source)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, copied, follow_symlinks=False)
                if file.suffix == ".so":
                    os.utime(copied)  # else an old time would let everything be compiled again
        if (source / ".venv").exists():
            (target / ".venv").symlink_to((source / ".venv").resolve())
        folders = [folder for folder in _SOURCES if (target / folder).exists()]
        subprocess.run([sys.executable, "-m", "compileall", "-q", *folders], cwd=target, check=True)
        return cls(target)

    def mutated(self, mutation: Mutation, target: Path) -> "Tree":
        """Copy this tree to `target`, which must not exist, and apply `mutation` there.

        Raises ValueError if the old text does not occur exactly once, and RuntimeError if the file does not compile.
        """
        shutil.copytree(self.root, target, symlinks=True)
        tree, file = Tree(target), target / mutation.file
        file.write_text(mutation.applied_to(file.read_text()))
        for cached in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            cached.unlink()  # a cached file counts as current if time in seconds and size agree
        if mutation.is_compiled:
            tree._compile(mutation)
        return tree

    def environment(self, plugins: Path) -> dict[str, str]:
        """Return the environment in which tests, and the processes that they start, import this tree.

        `plugins` is a folder with plugins of pytest.
        """
        temporary = self.root.parent / "t"
        temporary.mkdir(exist_ok=True)
        path = os.pathsep.join([str(self.root), str(plugins)])
        return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TMPDIR": str(temporary)}

    def _compile(self, mutation: Mutation) -> None:
        """Compile what depends on the file of `mutation`; of the kernels, the build for this processor alone."""
        before = self._compiled()
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        environment = {**os.environ, "VLLM_MP_BUILDS": "native"}
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or self._compiled() == before:  # a module that does not compile is left out
            raise RuntimeError(f"{mutation.name}: {mutation.file} does not compile: {done.stderr[-2000:]}")

    def _compiled(self) -> dict[Path, int]:
        """Return the compiled modules with the times at which they were made."""
        return {file: file.stat().st_mtime_ns for name in _SOURCES for file in (self.root / name).rglob("*.so")}
