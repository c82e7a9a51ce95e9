"""What `vllm-mp ps` reads of core processes."""

import os
import struct
import subprocess
import sys

import msgspec
import pytest

from vllm_mp import cli
from vllm_mp.cli.running_engines import RunningEngine, _engine, _is_core, _joined, running_engines, server_urls
from vllm_mp.core_link.core_description import CoreDescription
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.core_link.status_page import VERSION, StatusPage

ABOUT = CoreDescription(model="m", folders=["/m"], address="", parent_pid=7, num_restarts=2, started=0.0)


@pytest.fixture
def process(tmp_path):
    """The folder of a core process in a stand-in for /proc, and the path of the core's status page."""
    folder, page = tmp_path / str(os.getpid()), tmp_path / "a core.status"
    folder.mkdir()
    (folder / "status").write_text("Name:\tpython\nPPid:\t7\nVmRSS:\t   2048 kB\n")
    (folder / "cmdline").write_bytes(b"python\0-P\0-m\0vllm_mp.core\0")
    (folder / "maps").write_text(
        f"7f00-7f01 r-xp 0 fe:00 1 /usr/lib/libc.so.6\n7f02-7f03 rw-s 0 fe:00 2 {page}\n7f04-7f05 rw-p 0 0 0\n"
    )
    return folder, page


def test_core_is_described_by_the_page_that_it_has_mapped(process):
    folder, path = process
    page = StatusPage.create(str(path), 3)
    page.describe(ABOUT)
    page.enter(CoreState.LOADING, 0.4)
    page.note_client(5, b"token")
    engine = _engine(folder)
    assert (engine.description, engine.state, engine.num_clients) == (ABOUT, "loading 40%", 1)
    assert (engine.pid, engine.parent_pid, engine.memory) == (os.getpid(), 7, 2**21)
    report = engine.report()
    assert (report["kind"], report["model"], report["restarts"]) == ("private", "m", 2)


def test_page_of_another_version_is_refused_with_both_versions(process):
    folder, path = process
    StatusPage.create(str(path), 3)
    with path.open("r+b") as file:
        magic = struct.unpack("q", file.read(8))[0]
        file.seek(0)
        file.write(struct.pack("q", magic - 1))
    assert StatusPage.open(path) is None
    engine = _engine(folder)
    assert engine.state == "unknown"
    assert f"has version {VERSION - 1}, and this vllm-mp reads version {VERSION}" in engine.problem


def test_page_of_a_dead_core_is_not_taken_for_that_of_a_live_one(process):
    folder, path = process
    StatusPage.create(str(path), 3)
    engine = _engine(folder.rename(folder.with_name("123456")))
    assert engine.status is None
    assert "was removed or replaced" in engine.problem
    path.unlink()
    assert "was removed" in _engine(folder.with_name("123456")).problem


def test_core_without_a_page_is_starting_and_a_standby_is_no_engine(process):
    folder, _ = process
    (folder / "maps").write_text("")
    assert _engine(folder).state == "starting"
    assert _is_core(folder)
    (folder / "cmdline").write_bytes(b"python\0-P\0-m\0vllm_mp.core\0--standby\0")
    assert not _is_core(folder)


def test_engine_between_two_cores_is_shown_while_its_parent_has_the_page_of_the_dead_core(tmp_path):
    path = tmp_path / "core-1.status"
    page = StatusPage.create(str(path), 1)
    page.describe(msgspec.structs.replace(ABOUT, parent_pid=os.getpid(), address="ipc:///s"))
    path.unlink()
    (engine,) = (engine for engine in running_engines() if engine.page_location == str(tmp_path))
    report = engine.report()
    assert (report["pid"], report["parent_pid"], report["state"]) == (None, os.getpid(), "no core")
    assert (report["address"], report["model"]) == ("ipc:///s", "m")
    assert cli.main(["ps"]) == 0


def test_successor_of_a_dead_core_takes_its_place():
    dead = RunningEngine(None, 7, 0, description=ABOUT, page_location="/run/a")
    other = RunningEngine(5, 7, 0, description=ABOUT, page_location="/run/b")
    assert _joined([other], [dead, dead]) == [other, dead]
    starting = RunningEngine(6, 7, 0)
    _, successor = _joined([other, starting], [dead])
    assert (successor.pid, successor.state, successor.description.model) == (6, "starting", "m")
    assert successor.description.num_restarts == ABOUT.num_restarts + 1
    serving = starting._replace(description=ABOUT, page_location="/run/a")
    assert _joined([other, serving], [dead]) == [other, serving]


def test_health_finds_the_servers_of_this_machine_by_the_addresses_at_which_they_listen(capsys):
    code = """if True:
        import http.server
        server = http.server.HTTPServer(("0.0.0.0", 0), http.server.BaseHTTPRequestHandler)
        print(server.server_port, flush=True)
        server.serve_forever()"""
    arguments = (sys.executable, "-c", code, "vllm-mp", "serve", "--port", "0")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        assert url in server_urls()
        # This server knows no path.
        assert cli.main(["health"]) == 1
        assert f"{url}: 501" in capsys.readouterr().out
        server.kill()
    assert url not in server_urls()
    assert cli.main(["health", url]) == 1
    assert "Connection refused" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--ssl_certfile=c"], ["--config", "a file.yaml"]])
def test_options_of_a_server_count_with_underscores_and_in_a_file(tmp_path, flags):
    (tmp_path / "a file.yaml").write_text("ssl_certfile: c\nport: 8000\n")
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    arguments = (sys.executable, "-c", code, "vllm-mp", "serve", *flags)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, cwd=tmp_path, **pipes) as server:
        assert f"https://127.0.0.1:{int(server.stdout.readline())}" in server_urls()


@pytest.mark.parametrize("flags", [["--uds", "http socket"], ["--uds=http socket"], ["--config=c.yaml"]])
def test_health_finds_a_server_on_a_unix_socket_by_its_flag(tmp_path, capsys, flags):
    code = """if True:
        import socket
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("http socket")
        listener.listen()
        print("listening", flush=True)
        while True:
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 204 No Content\\r\\n\\r\\n")"""
    url = f"unix:{tmp_path}/http socket"
    (tmp_path / "c.yaml").write_text("uds: http socket")
    arguments = (sys.executable, "-c", code, "vllm-mp", "serve", *flags, "--metrics-port", "0")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        server.stdout.readline()
        assert url in server_urls()
        cli.main(["health"])
        assert f"{url}: 204" in capsys.readouterr().out
        server.kill()
    assert url not in server_urls()
    assert cli.main(["health", url]) == 1
    assert "Connection refused" in capsys.readouterr().out
