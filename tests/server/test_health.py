"""What the server says about itself and its core."""

import asyncio

from vllm_mp import __version__


def test_a_ready_server_says_so_and_names_its_core(server):
    assert server.get("/health") == (200, {"status": "ok"})
    assert server.get("/ready") == (200, {"status": "ready"})
    assert server.get("/version") == (200, {"version": __version__})
    status, core = server.get("/core_status")
    assert status == 200
    assert core["answers"] is True
    assert core["pid"] != server.pid


def test_application_answers_through_a_core_without_a_model(in_process):
    async def run():
        async with in_process() as client:
            assert (await client.get("/ready")).json() == {"status": "ready"}

    asyncio.run(run())
