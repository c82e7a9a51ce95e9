"""Compiled kernels are found again by the next process, also in a folder that was moved; damage costs a compilation."""

import json
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from vllm_mp.kernels.triton import available
from vllm_mp.kernels.triton.kernel_cache import KernelCache
from vllm_mp.model_store.cache import CACHE_VARIABLE

FILES = {"add.cubin": b"\x7fELF code", "add.json": '{"name": "add"}'}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(KernelCache, "_aside", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return folder


def store(cache):
    cache.put_group("add.json", {name: cache.put(data, name) for name, data in FILES.items()})


def found(cache):
    """Return the contents of the files of the kernel; None if it must be compiled."""
    paths = cache.get_group("add.json")
    return paths and {name: Path(path).read_bytes() for name, path in paths.items()}


CONTENTS = {"add.cubin": b"\x7fELF code", "add.json": b'{"name": "add"}'}


def test_kernel_is_found_again(folder):
    assert found(KernelCache("K")) is None
    store(KernelCache("K"))
    assert found(KernelCache("K")) == CONTENTS
    assert sorted(os.listdir(folder / "K")) == ["__grp__add.json", *FILES], "no temporary file is left"


def test_kernel_is_found_when_the_folder_was_moved(folder, tmp_path, monkeypatch):
    store(KernelCache("K"))
    shutil.move(folder, tmp_path / "elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert found(KernelCache("K")) == CONTENTS


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_kernel_with_a_damaged_file_is_compiled_again(folder, name, damage, caplog):
    store(KernelCache("K"))
    file = folder / "K" / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"" if damage == "truncated" else CONTENTS[name][:-1] + b"?")
    with caplog.at_level(logging.WARNING):
        assert found(KernelCache("K")) is None
    assert str(folder / "K") in caplog.text
    assert "compiled again" in caplog.text
    store(KernelCache("K"))
    assert found(KernelCache("K")) == CONTENTS


@pytest.mark.parametrize("content", ["", "[]", "{", '{"digests": 5}', '{"digests": {"/etc/hostname": "00"}}'])
def test_kernel_with_a_damaged_list_of_files_is_compiled_again(folder, content):
    store(KernelCache("K"))
    (folder / "K" / "__grp__add.json").write_text(content)
    assert found(KernelCache("K")) is None


def test_kernel_that_triton_itself_has_kept_is_found(folder):
    cache = KernelCache("K")
    paths = {name: cache.put(data, name) for name, data in FILES.items()}
    cache.put(json.dumps({"child_paths": paths}), "__grp__add.json")
    assert found(KernelCache("K")) == CONTENTS


def test_processes_that_store_the_same_kernel_do_not_disturb_each_other(folder):
    stop = threading.Event()
    failures = []

    def write():
        while not stop.is_set():
            store(KernelCache("K"))

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    try:
        while found(KernelCache("K")) is None:
            pass
        failures = [1 for _ in range(100) if found(KernelCache("K")) != CONTENTS]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert not failures


@pytest.mark.parametrize("obstacle", ["no folder", "no space"])
def test_kernel_that_cannot_be_kept_is_compiled_all_the_same(folder, obstacle, monkeypatch, caplog):
    if obstacle == "no folder":
        folder.write_text("a file in its place")
    else:
        put = triton.runtime.cache.FileCacheManager.put

        def full(cache, *args, **named):
            if cache.cache_dir.startswith(str(folder)):
                raise OSError(28, "No space left on device")
            return put(cache, *args, **named)

        monkeypatch.setattr(triton.runtime.cache.FileCacheManager, "put", full)
    with caplog.at_level(logging.WARNING):
        for key in ("K", "L"):
            cache = KernelCache(key)
            store(cache)
            assert found(cache) == CONTENTS
    assert caplog.text.count("compiled kernels cannot be kept") == 1
    assert "TRITON_CACHE_DIR" in caplog.text


def test_error_of_the_temporary_folder_is_raised(folder, monkeypatch):
    def full(*args, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(triton.runtime.cache.FileCacheManager, "put", full)
    with pytest.raises(OSError, match="No space"):
        KernelCache("K").put(b"", "add.cubin")


def test_kernels_lie_in_the_cache_folder_unless_a_variable_says_where(tmp_path, monkeypatch):
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_MANAGER", "TRITON_STORE_BINARY_ONLY"):
        monkeypatch.setenv(name, "")  # so that what is set is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    available.keep_compiled_kernels()
    assert triton.knobs.cache.dir == str(tmp_path / "kernels")
    assert isinstance(triton.runtime.cache.get_cache_manager("00"), KernelCache)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    available.keep_compiled_kernels()
    assert triton.knobs.cache.dir == "/elsewhere"
