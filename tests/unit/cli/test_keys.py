"""Keys over real CURVE sockets: who may connect over TCP, and what a client hears that may not."""

import os

import msgspec
import pytest
from support.fake_core import FakeCore

from vllm_mp import EngineArgs, EngineStartError, cli
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.cores.sources.held_address import HeldAddress, listen_at
from vllm_mp.core.ipc.bound_socket import BoundSocket
from vllm_mp.keys.authorized_clients import AuthorizedClients
from vllm_mp.keys.curve_keys import encode_key, make_client_key, make_server_key, read_client_key, read_server_key


@pytest.fixture
def keys(tmp_path):
    """A server key, and the keys of two clients of which the first is allowed."""
    server, first, second = (tmp_path / name for name in ("server.key", "first.key", "second.key"))
    public = make_server_key(server).public
    AuthorizedClients(server).allow("first", make_client_key(first, public).public)
    make_client_key(second, public)
    return server, first, second


@pytest.fixture
def address(default_model, keys, tmp_path):
    """The address of a core with the server key."""
    held = HeldAddress("tcp://127.0.0.1:0", str(keys[0]))
    public = held.public_address()
    # A core has a descriptor of its own, which it closes.
    public = msgspec.structs.replace(public, listener=os.dup(public.listener))
    path = tmp_path / "core.sock"
    bound = BoundSocket(f"ipc://{path}", listen_at(path).detach(), public)
    core = FakeCore("", EngineArgs(model=str(default_model)).create_engine_config(), socket=bound.socket)
    yield held.address
    core.close()
    bound.close()
    held.close()


def greet(address, key, timeout=20):
    connection = CoreConnection(address, str(key))
    try:
        return connection.greet(timeout, lambda: None)[0]
    finally:
        connection.close()


def test_allowed_client_is_served_and_others_are_refused_at_once(address, keys):
    server, first, second = keys
    assert greet(address, first).version
    with pytest.raises(EngineStartError, match=rf"does not know the key in {second}.*vllm-mp keys allow"):
        greet(address, second)
    AuthorizedClients(server).allow("second", read_client_key(second).public)
    assert greet(address, second).version
    AuthorizedClients(server).revoke("first")
    with pytest.raises(EngineStartError, match=rf"{first}, or it was revoked"):
        greet(address, first)


def test_client_of_another_server_hears_what_to_check(address, tmp_path):
    other = make_server_key(tmp_path / "other.key").public
    make_client_key(tmp_path / "client.key", other)
    with pytest.raises(EngineStartError, match="made with that core's public key"):
        greet(address, tmp_path / "client.key", timeout=1)


def test_damaged_list_admits_no_client_and_the_core_serves_on_when_it_is_corrected(address, keys):
    server, first, _ = keys
    path = AuthorizedClients(server).path
    content = path.read_text()
    path.write_text(content + "nonsense\n")
    with pytest.raises(EngineStartError, match="does not know the key"):
        greet(address, first)
    path.write_text(content)
    assert greet(address, first).version


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_key_file_for_others_is_refused_with_the_remedy(keys, mode):
    server, first, _ = keys
    for path, read in ((server, read_server_key), (first, read_client_key)):
        path.chmod(mode)
        with pytest.raises(ValueError, match=rf"chmod 600 {path}"):
            read(path)


def test_list_that_others_can_write_is_refused_with_the_remedy(keys):
    clients = AuthorizedClients(keys[0])
    clients.path.chmod(0o666)
    with pytest.raises(ValueError, match="chmod go-w"):
        clients.read()


def test_key_files_of_the_wrong_kind_name_the_command_that_makes_the_right_one(keys, tmp_path):
    server, first, _ = keys
    with pytest.raises(ValueError, match="vllm-mp keys server"):
        read_server_key(first)
    with pytest.raises(ValueError, match="vllm-mp keys client"):
        read_client_key(server)
    with pytest.raises(ValueError, match="vllm-mp keys server"):
        read_server_key(tmp_path / "absent")
    old = tmp_path / "old"
    old.write_text("x" * 40 + "\n" + "y" * 40 + "\n")
    old.chmod(0o600)
    with pytest.raises(ValueError, match=r"earlier versions.*vllm-mp keys client"):
        read_client_key(old)


def test_commands_make_allow_list_and_revoke(tmp_path, capsys):
    server, client = str(tmp_path / "server"), str(tmp_path / "client")
    assert cli.main(["keys", "server", server]) == 0
    assert cli.main(["keys", "client", client, "--server", f"{server}.pub"]) == 0
    for path in (server, client):
        assert os.stat(path).st_mode & 0o777 == 0o600
    assert read_client_key(client).server == read_server_key(server).public
    assert cli.main(["keys", "allow", server, "alice", f"{client}.pub"]) == 0
    capsys.readouterr()
    assert cli.main(["keys", "list", server]) == 0
    public = encode_key(read_client_key(client).public)
    assert capsys.readouterr().out == f"alice {public}\n"
    assert cli.main(["keys", "revoke", server, "alice"]) == 0
    assert cli.main(["keys", "allow", server, "alice", public]) == 0
    for wrong, words in {
        ("server", server): "exists",
        ("client", f"{client}2", "--server", "nonsense"): "nonsense",
        ("allow", server, "alice", public): "revoke it first",
        ("allow", server, "bob", public): "as alice",
        ("allow", server, "a b", public): "choose another",
        ("revoke", server, "bob"): "alice",
        ("list", client): "vllm-mp keys server",
    }.items():
        assert cli.main(["keys", *wrong]) == 2
        assert words in capsys.readouterr().err
