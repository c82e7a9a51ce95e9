"""A client connects only to a core of its own user, of root, or of the user that it names."""

import os
import re
import socket
import threading

import pytest
from support.fake_core import FakeCore

from vllm_mp import AsyncLLM, EngineArgs, EngineStartError
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.cores.socket_owner import check_socket_file
from vllm_mp.client.cores.sources.held_address import HeldAddress, listen_at
from vllm_mp.client.cores.sources.process import CoreProcess
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.machine.file_owner import trusted_owners

OTHER = 54321
"""A user id that no user has."""


@pytest.fixture
def path(socket_folder):
    """The path of a Unix socket."""
    folder = socket_folder / "folder"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "core.sock"))
    return folder / "core.sock"


def test_socket_of_this_user_is_accepted_and_an_absent_one_is_waited_for(path):
    assert check_socket_file(path, trusted_owners())
    assert not check_socket_file(path.with_name("absent"), trusted_owners())
    assert not check_socket_file(path.parent / "absent" / "core.sock", trusted_owners())


def test_socket_of_another_user_is_refused_with_the_remedy(path):
    with pytest.raises(EngineStartError, match=rf"{path} belongs to user.*--core-owner"):
        check_socket_file(path, {OTHER})


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the owner of a file")
def test_client_connects_to_the_core_of_another_user_only_if_it_names_that_user(path, default_model):
    os.chown(path, OTHER, -1)
    with pytest.raises(EngineStartError, match=f"belongs to user {OTHER}"):
        AsyncLLM.connect(f"ipc://{path}", timeout=5)
    assert check_socket_file(path, trusted_owners() | {OTHER})
    with pytest.raises(EngineStartError, match="did not answer"):
        AsyncLLM.connect(f"ipc://{path}", timeout=0.2, core_owner=str(OTHER))
    with pytest.raises(ValueError, match="no user"):
        AsyncLLM.connect(f"ipc://{path}", core_owner="no such user")


def test_socket_in_a_folder_that_others_can_write_is_refused_unless_the_folder_is_sticky(path):
    path.parent.chmod(0o777)
    with pytest.raises(EngineStartError, match=rf"chmod go-w {path.parent}"):
        check_socket_file(path, trusted_owners())
    path.parent.chmod(0o1777)
    assert check_socket_file(path, trusted_owners())


def test_link_from_a_folder_that_others_can_write_is_refused(path, socket_folder):
    link = socket_folder / "open" / "core.sock"
    link.parent.mkdir()
    link.parent.chmod(0o777)
    link.symlink_to(path)
    with pytest.raises(EngineStartError, match="chmod go-w"):
        check_socket_file(link, trusted_owners())


def test_process_of_another_user_behind_the_socket_is_refused(default_model, socket_folder):
    address = f"ipc://{socket_folder}/core.sock"
    core = FakeCore(address, EngineArgs(model=str(default_model)).create_engine_config())
    try:
        for owners, words in ((trusted_owners(), None), ({OTHER}, f"process {os.getpid()}.*--core-owner")):
            connection = CoreConnection(address, owners=owners)
            try:
                if words is None:
                    assert connection.greet(20, lambda: None)
                else:
                    with pytest.raises(EngineStartError, match=words):
                        connection.greet(20, lambda: None)
            finally:
                connection.close()
    finally:
        core.close()


@pytest.mark.parametrize("listen", [listen_at, lambda path: HeldAddress(f"ipc://{path}")], ids=["private", "public"])
def test_socket_has_its_mode_from_the_moment_it_is_bound(socket_folder, monkeypatch, listen):
    """Other processes could connect between bind and a change of the mode."""
    path, modes = socket_folder / "core.sock", []
    seen, appeared = threading.Event(), path.exists

    def look():
        while not appeared():
            pass
        modes.append(path.stat().st_mode & 0o777)
        seen.set()

    before = os.umask(0)
    try:
        monkeypatch.setattr(type(path), "chmod", lambda *_: seen.wait(20))
        watcher = threading.Thread(target=look)
        watcher.start()
        bound = listen(path)
        watcher.join()
        bound.close()
        assert modes == [0o600]
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_core_refuses_to_listen_in_a_folder_that_others_can_write(socket_folder):
    folder = socket_folder / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=rf"chmod go-w {re.escape(str(folder))}"):
        HeldAddress(f"ipc://{folder}/core.sock")


def test_core_is_not_started_in_a_runtime_folder_that_others_can_read(socket_folder):
    folder = socket_folder / "runtime"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match=rf"chmod 700 {re.escape(str(folder))}"):
        CoreProcess(folder, 1)
    assert not list(folder.iterdir())


def test_status_page_of_another_user_is_not_mapped(socket_folder, monkeypatch):
    path = socket_folder / "core.sock.status"
    StatusPage.create(str(path), 1)
    assert StatusPage.open(path) is not None
    monkeypatch.setattr("vllm_mp.core_link.status_page.trusted_owners", lambda: frozenset({OTHER}))
    assert StatusPage.open(path) is None
