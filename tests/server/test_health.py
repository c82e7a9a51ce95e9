"""What the server says about itself and its core."""

from vllm_mp import __version__


def test_a_ready_server_says_so_and_names_its_core(server):
    assert server.get("/health") == (200, {"status": "ok"})
    assert server.get("/ready") == (200, {"status": "ready"})
    assert server.get("/version") == (200, {"version": __version__})
    status, core = server.get("/core_status")
    assert status == 200
    assert core["answers"] is True
    assert core["pid"] != server.pid
