"""The largest library of torch, which a thread loads while this process imports other modules.

While the system loads a library, every other import that loads one waits for it. So the modules with small libraries
come first, and those without follow meanwhile. Nothing here imports torch.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_TORCH_LIBRARIES: Final = {
    "libtorch_global_deps.so": os.RTLD_NOW | os.RTLD_GLOBAL,
    "libtorch_cpu.so": os.RTLD_NOW,
}
"""The libraries that take `import torch` the longest, in its order and with its flags."""
_GPU_LIBRARIES: Final = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")
_MODULES_WITH_LIBRARIES: Final = (
    *("_asyncio", "_bisect", "_bz2", "_contextvars", "_csv", "_heapq", "_json", "_lzma", "_multiprocessing"),
    *("_pickle", "_posixshmem", "_posixsubprocess", "_queue", "_random", "_sha2", "_sha512", "_socket", "_ssl"),
    *("_struct", "array", "binascii", "cmath", "fcntl", "grp", "hashlib", "math", "mmap", "resource", "select"),
    *("unicodedata", "zlib", "msgspec", "numpy", "zmq"),
)
"""What a core imports from libraries, torch left out. Some of Python's own are not in all its versions."""
_MODULES_OF_TORCH: Final = (
    *("argparse", "concurrent.futures.thread", "csv", "difflib", "gzip", "importlib.metadata", "importlib.resources"),
    *("multiprocessing.connection", "multiprocessing.context", "multiprocessing.reduction", "multiprocessing.spawn"),
    *("multiprocessing.util", "pickletools", "pkgutil", "runpy", "tarfile", "torchgen.model", "tqdm", "unittest.mock"),
    "urllib.request",
)
"""What `import torch` imports beside itself."""


@contextlib.contextmanager
def torch_library_beside() -> Iterator[None]:
    """Load the library in a thread while the imports of this block run; the thread ends with the block."""
    _import_modules_with_libraries()
    thread = threading.Thread(target=load_torch_library, name="torch-library")
    thread.start()
    try:
        yield
        for name in _MODULES_OF_TORCH:
            with contextlib.suppress(ImportError):  # torch says so itself if it needs it
                importlib.import_module(name)
    finally:
        thread.join()


def load_torch_library() -> None:
    """Load the largest library of a build of torch for CPUs, so that `import torch` finds it loaded.

    An import holds the interpreter's lock while it loads a library; this function does not. No-op for other builds,
    which load libraries of GPUs first, and if a library cannot be loaded: `import torch` will say why.
    """
    with contextlib.suppress(ImportError, ValueError, AttributeError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return
        folder = Path(spec.submodule_search_locations[0], "lib")
        if any((folder / name).exists() for name in _GPU_LIBRARIES):
            return
        libc = ctypes.CDLL(None)
        libc.dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
        libc.dlopen.restype = ctypes.c_void_p
        for name, flags in _TORCH_LIBRARIES.items():
            libc.dlopen(os.fsencode(folder / name), flags)


def _import_modules_with_libraries() -> None:
    """Import `_MODULES_WITH_LIBRARIES`. NumPy starts no threads, which would compete and could not be forked."""
    is_limited = "OPENBLAS_NUM_THREADS" in os.environ
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in _MODULES_WITH_LIBRARIES:
        with contextlib.suppress(ImportError):  # who needs it says so
            importlib.import_module(name)
    if not is_limited:
        del os.environ["OPENBLAS_NUM_THREADS"]
