"""`python -m vllm_mp.replay_core`: run a replay core until SIGTERM or SIGINT."""

import argparse
import mmap
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from vllm_mp.config.engine_args import EngineArgs
from vllm_mp.replay_core.core import Pace, serve

_NUM_BLOCKS = 2**16


def main() -> int:
    """Run the core that the arguments describe; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_mp.replay_core", description="Answer requests with recorded tokens, without a model."
    )
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="address of the core: ipc:///PATH/TO/SOCKET")
    parser.add_argument(
        "--model", default=EngineArgs.model, help="model whose configuration and tokenizer the core names"
    )
    parser.add_argument("--served-model-name", help="as for an engine")
    parser.add_argument("--max-model-len", type=int, help="as for an engine")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="tokens per second of each stream; 0, the default: as fast as possible"
    )
    parser.add_argument(
        "--taken",
        type=Path,
        metavar="FILE",
        help="8 bytes in which the consumer counts the steps that it has taken; the core waits for it",
    )
    parser.add_argument(
        "--ahead", type=int, default=1, help="steps that the core may be ahead of --taken (default: %(default)s)"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    try:
        options: dict[str, Any] = {name: getattr(args, name) for name in ("served_model_name", "max_model_len")}
        config = EngineArgs(model=args.model, dtype="float32", **options).create_engine_config()
        config.cache_config.num_blocks = _NUM_BLOCKS
        config.device_config.device = "cpu"
        serve(args.listen, config, Pace(args.rate, None if args.taken is None else _map(args.taken), args.ahead))
    except ValueError as error:
        print(f"replay core: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def _map(file: Path) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    with file.open("r+b") as opened:
        return np.frombuffer(mmap.mmap(opened.fileno(), 8), np.uint64)


def _stop(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
