#!/usr/bin/env python3
"""Fetch the packages that a machine with a GPU may lack, and print the commands of the GPU check for it.

    python tools/gpu/pack.py                  # into build/gpu_check, for Python 3.12
    python tools/gpu/pack.py --tree           # with an archive of this commit too

The machine has torch, triton and transformers, and no network. The wheels are small; with a copy of the repository,
they are all that tools/gpu_check.py needs.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("msgspec", "pyzmq", "psutil", "pytest", "pytest-timeout", "pytest-xdist")
COMMANDS = """python -m pip install --no-index --find-links {wheels} {packages}
python tools/gpu_check.py --commit {commit} --call first --out 1.json
python tools/gpu_check.py --commit {commit} --call second --after 1.json --out 2.json"""


def main() -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu_check", help="the folder to fill (%(default)s)")
    parser.add_argument("--python", default="3.12", help="the machine's version of Python (%(default)s)")
    parser.add_argument("--tree", action="store_true", help="write an archive of the committed files too")
    args = parser.parse_args()
    wheels = args.out / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(wheels)]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (28, 26, 24, 17)] + ["manylinux2014_x86_64"]
    pip += ["--python-version", args.python, *(f"--platform={name}" for name in platforms)]
    fetched = subprocess.run([*pip, *PACKAGES], check=False)
    if fetched.returncode:
        return fetched.returncode
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    if args.tree:
        subprocess.run([*git, "archive", "--output", str(args.out.resolve() / "tree.tar.gz"), "HEAD"], check=True)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out} has {size / 2**20:.1f} MiB; in the repository on the machine with the GPU run:\n")
    shown = wheels.relative_to(ROOT) if wheels.is_relative_to(ROOT) else wheels
    print(COMMANDS.format(wheels=shown, packages=" ".join(PACKAGES), commit=commit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
