"""LoRA adapters over HTTP: as models of their names, and loaded by requests."""

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.lora_engines import LORA, PROMPT, save_adapters

from vllm_mp.server.app import build_app
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.testing.engines import eventually, running_engine

pytestmark = pytest.mark.usefixtures("forked_cores")

MODEL = "base"


@pytest.fixture(scope="module")
def adapters(small_model, tmp_path_factory):
    return save_adapters(small_model, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def engine(small_model, adapters):
    """An engine that loads two adapters at its start."""
    modules = tuple(f"{adapters[number].lora_name}={adapters[number].lora_path}" for number in (1, 2))
    with running_engine(small_model, **LORA, lora_modules=modules, served_model_name=MODEL) as engine:
        yield engine


def client(engine, **options):
    app = build_app(engine, ServerOptions(**options))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def complete(server, model):
    """Return the status and the text of a completion by `model`."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = await server.post("/v1/completions", json=body)
    answer = response.json()
    if response.status_code == 200:
        assert answer["model"] == model
        return 200, answer["choices"][0]["text"]
    return response.status_code, answer["error"]["message"]


def test_adapter_is_served_as_a_model_of_its_name(engine):
    async def run():
        async with client(engine) as server:
            models = (await server.get("/v1/models")).json()["data"]
            assert [(model["id"], model["root"], model.get("parent")) for model in models] == [
                (MODEL, MODEL, None),
                ("adapter-1", "adapter-1", MODEL),
                ("adapter-2", "adapter-2", MODEL),
            ]
            assert (await server.get("/v1/models/adapter-1")).json()["id"] == "adapter-1"
            texts = [await complete(server, model) for model in (MODEL, "adapter-1", "adapter-2")]
            assert [status for status, _ in texts] == [200, 200, 200]
            assert len({text for _, text in texts}) == 3
            status, message = await complete(server, "adapter-3")
            assert (status, "the model 'adapter-3' does not exist; the server has 'base', 'adapter-1'" in message) == (
                404,
                True,
            )

    asyncio.run(run())


def test_metrics_name_the_adapters_of_live_requests(engine):
    async def labels(server):
        families = text_string_to_metric_families((await server.get("/metrics")).text)
        [sample] = next(family for family in families if family.name == "vllm:lora_requests_info").samples
        return sample.labels["waiting_lora_adapters"], sample.labels["running_lora_adapters"], sample.labels["max_lora"]

    async def run():
        async with client(engine) as server:
            await engine.pause_generation(mode="keep")
            pending = [asyncio.create_task(complete(server, name)) for name in ("adapter-2", "adapter-1", "adapter-1")]

            async def all_wait():
                return await labels(server) == ("adapter-1,adapter-2", "", str(LORA["max_loras"]))

            await eventually(all_wait)
            await engine.resume_generation()
            assert [status for status, _ in await asyncio.gather(*pending)] == [200] * 3
            assert await labels(server) == ("", "", str(LORA["max_loras"]))

    asyncio.run(run())


def test_vectors_are_made_with_the_adapter_that_is_named(engine):
    async def vector(server, model):
        return (await server.post("/v1/embeddings", json={"model": model, "input": PROMPT})).json()["data"]

    async def run():
        async with client(engine) as server:
            assert await vector(server, MODEL) != await vector(server, "adapter-1")

    asyncio.run(run())


def test_adapters_are_loaded_and_unloaded_by_requests_if_the_operator_allows_it(engine, adapters, tmp_path):
    body = {"lora_name": "adapter-3", "lora_path": adapters[3].lora_path}

    async def run():
        async with client(engine, allow_runtime_lora_updating=True) as server:
            both = [server.post("/v1/load_lora_adapter", json=body | {"lora_name": name}) for name in ("a", "b")]
            assert [response.status_code for response in await asyncio.gather(*both)] == [200, 200]
            assert (await complete(server, "a")) == (await complete(server, "b"))
            again = await server.post("/v1/load_lora_adapter", json=body | {"lora_name": "a"})
            assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
            base = await server.post("/v1/load_lora_adapter", json=body | {"lora_name": MODEL})
            assert base.status_code == 400
            in_place = body | {"lora_name": "a", "lora_path": adapters[4].lora_path, "load_inplace": True}
            assert (await server.post("/v1/load_lora_adapter", json=in_place)).status_code == 200
            assert (await complete(server, "a")) != (await complete(server, "b"))
            nowhere = await server.post(
                "/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": str(tmp_path / "nowhere")}
            )
            assert nowhere.status_code == 400
            assert "is not a folder" in nowhere.json()["error"]["message"]
            for name in ("a", "b"):
                assert (await server.post("/v1/unload_lora_adapter", json={"lora_name": name})).status_code == 200
            assert (await server.post("/v1/unload_lora_adapter", json={"lora_name": "a"})).status_code == 404
            assert (await complete(server, "a"))[0] == 404

    asyncio.run(run())


def test_first_adapter_of_a_server_is_loaded_by_a_request(small_model, adapters):
    async def run(engine):
        async with client(engine, allow_runtime_lora_updating=True) as server:
            body = {"lora_name": "first", "lora_path": adapters[3].lora_path}
            assert (await server.post("/v1/load_lora_adapter", json=body)).status_code == 200
            assert (await complete(server, "first"))[0] == 200

    with running_engine(small_model, **LORA, served_model_name=MODEL) as engine:
        asyncio.run(run(engine))


def test_load_that_takes_long_holds_up_no_load_and_no_removal_of_another_adapter(small_model, adapters):
    async def load(server, name, number):
        body = {"lora_name": name, "lora_path": adapters[number].lora_path}
        return (await server.post("/v1/load_lora_adapter", json=body)).status_code

    async def run(engine):
        async with client(engine, allow_runtime_lora_updating=True) as server:
            slow = asyncio.create_task(load(server, "endless", 1))
            assert await load(server, "other", 2) == 200
            assert (await complete(server, "other"))[0] == 200
            unload = {"lora_name": "other"}
            assert (await server.post("/v1/unload_lora_adapter", json=unload)).status_code == 200
            assert not slow.done()
            slow.cancel()
            assert await load(server, "third", 3) == 200
            assert (await complete(server, "third"))[0] == 200

    fault = "hang@adapter,about=endless"
    with running_engine(small_model, **LORA, served_model_name=MODEL, fault_injection=fault) as engine:
        asyncio.run(asyncio.wait_for(run(engine), 60))


def test_requests_name_no_folder_unless_the_operator_allows_it(engine, adapters):
    async def run():
        async with client(engine) as server:
            body = {"lora_name": "x", "lora_path": adapters[3].lora_path}
            refused = await server.post("/v1/load_lora_adapter", json=body)
            assert refused.status_code == 403
            assert "--allow-runtime-lora-updating" in refused.json()["error"]["message"]
            assert (await server.post("/v1/unload_lora_adapter", json={"lora_name": "adapter-1"})).status_code == 403
            assert (await complete(server, "adapter-1"))[0] == 200

    asyncio.run(run())
