"""A command works also where its standard streams are closed, as service managers and scripts may close them."""

import subprocess
import sys

import pytest

CODE = """if True:
    import os, sys
    from vllm_mp import cli
    code = cli.main(["completion", "bash"])
    print("not read", file=sys.stderr)
    os._exit(code or os.open(os.devnull, os.O_RDONLY) < 3)"""


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_replaced(closed):
    command = f'exec "$0" -c "$1" {closed}'
    assert subprocess.run(["sh", "-c", command, sys.executable, CODE], timeout=60).returncode == 0
