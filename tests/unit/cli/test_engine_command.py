"""The command `engine`."""

import pytest

from vllm_mp import cli


def test_several_cores_are_refused_with_the_remedy(tmp_path):
    args = cli.parser().parse_args(["engine", "--listen", f"ipc://{tmp_path}/core.sock", "--data-parallel-size", "2"])
    with pytest.raises(
        ValueError, match="--data-parallel-size 2: `vllm-mp engine` runs one core; run it once for each"
    ):
        args.run(args)


def test_core_on_several_machines_is_not_taken_over(tmp_path):
    flags = ["--takeover", "--nnodes", "2", "--tensor-parallel-size", "2"]
    args = cli.parser().parse_args(["engine", "--listen", f"ipc://{tmp_path}/core.sock", *flags])
    with pytest.raises(ValueError, match=r"--takeover with --nnodes 2: .*; stop the running engine"):
        args.run(args)
