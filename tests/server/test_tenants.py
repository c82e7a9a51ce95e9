"""The tenants of a server: what holders of different API keys share, and what they cannot take from one another."""

import asyncio

import httpx
import pytest

from vllm_mp.errors import NoRoomError
from vllm_mp.server.app import build_app
from vllm_mp.server.http.admission import Admission
from vllm_mp.server.http.errors import ApiError, as_api_error
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.server.http.shared_state import SharedState, make_shared_memory
from vllm_mp.server.http.tenants import SECRET_BYTES, Tenants, different_keys, new_secret, note_tenant
from vllm_mp.testing.engines import eventually

_PROMPT = "The same question of two tenants, which is long enough to fill some blocks of the cache. " * 4


def client_of(engine, **options):
    """Return a client of a server with keys "a" and "b" and the given options."""
    app = build_app(engine, ServerOptions(api_key=("a", "b"), **options))
    asking = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60)
    asking.admission = app.state.server.admission
    return asking


async def cached_tokens(client, key, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    response = await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.essential
def test_tenant_does_not_see_what_another_has_asked(llm):
    async def run():
        async with client_of(llm) as asking:
            prompt = "essential " + _PROMPT
            assert await cached_tokens(asking, "a", prompt) == 0
            assert await cached_tokens(asking, "b", prompt) == 0
            assert await cached_tokens(asking, "a", prompt) > 0
            assert await cached_tokens(asking, "b", prompt) > 0
            # Salts of the tenants' own still separate what they want to separate.
            assert await cached_tokens(asking, "a", prompt, cache_salt="own") == 0
            assert await cached_tokens(asking, "b", prompt, cache_salt="own") == 0
            assert await cached_tokens(asking, "a", prompt, cache_salt="own") > 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "usage"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": _PROMPT}]}, "prompt_tokens_details"),
        ("/v1/responses", {"input": "responses " + _PROMPT}, "input_tokens_details"),
    ],
)
def test_no_endpoint_shows_what_another_tenant_has_asked(real_llm, path, body, usage):
    async def run():
        async with client_of(real_llm) as asking:

            async def ask(key):
                limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
                response = await asking.post(path, json=body | {limit: 1}, headers={"Authorization": f"Bearer {key}"})
                assert response.status_code == 200, response.text
                return response.json()["usage"][usage]["cached_tokens"]

            before = await ask("a")
            assert await ask("b") == 0 == before
            assert await ask("b") > 0

    asyncio.run(run())


def test_tenants_share_prefixes_if_the_operator_lets_them(llm):
    async def run():
        async with client_of(llm, shared_prefix_cache=True) as asking:
            prompt = "shared " + _PROMPT
            assert await cached_tokens(asking, "a", prompt) == 0
            assert await cached_tokens(asking, "b", prompt) > 0

    asyncio.run(run())


def test_salt_that_is_too_long_is_refused_without_the_salt_of_the_tenant(llm):
    async def run():
        async with client_of(llm) as asking:
            body = {"prompt": "x", "cache_salt": "s" * 2000}
            response = await asking.post("/v1/completions", json=body, headers={"Authorization": "Bearer a"})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "cache_salt"
            assert "'sss" in response.json()["error"]["message"]

    asyncio.run(run())


def salts(secret=None, given="", **options):
    """Return the salts of the tenants of a server."""
    tenants = Tenants(ServerOptions(**options), secret)
    made = []
    for number in range(len(tenants)):
        scope = {}
        note_tenant(scope, number)
        made.append(tenants.of(scope).cache_salt(given))
    return made


def test_each_key_has_a_salt_of_its_own_that_tells_nothing():
    keys = ("key-one", "key-two", "key-one")
    own = salts(bytes(SECRET_BYTES), api_key=keys)
    assert len(own) == len(set(own)) == len(different_keys(ServerOptions(api_key=keys))) == 2
    assert not any("key" in salt for salt in own)
    assert not set(own) & set(salts(bytes(SECRET_BYTES), "given", api_key=keys))
    assert salts(api_key=("key-one",), given="given") == salts(given="given") == ["given"]


def test_salts_are_the_same_in_all_processes_and_at_a_core_that_outlives_the_server():
    keys = ("key-one", "key-two")
    private, connected = ServerOptions(api_key=keys), ServerOptions(api_key=keys, connect="ipc:///run/core.sock")
    secret = new_secret(private)
    assert salts(secret, api_key=keys) == salts(secret, api_key=keys)
    assert salts(secret, api_key=keys) != salts(new_secret(private), api_key=keys)
    assert new_secret(connected) == new_secret(connected)


def test_tenant_may_take_all_places_and_each_other_still_finds_its_share():
    async def run():
        admission = Admission(100, num_tenants=4)
        async with admission.admit(100, 0):
            with pytest.raises(ApiError) as refusal:
                await admission.admit(1, 0).__aenter__()
            async with admission.admit(25, 1), admission.admit(20, 2):
                with pytest.raises(ApiError):
                    await admission.admit(1, 1).__aenter__()
                async with admission.admit(5, 2):
                    assert admission.num_live == 150
            assert admission.num_live == 100
        async with admission.admit(60, 1):
            assert admission.num_live == 60
        return refusal.value

    refusal = asyncio.run(run())
    assert (refusal.status, refusal.code) == (429, "too_many_requests")
    assert "100 run or wait, 100 of them with this API key, whose share is 25, the limit is 100; rep" in refusal.message


def test_shares_hold_over_all_processes_of_a_server_and_end_with_a_process():
    async def run():
        memory = make_shared_memory(2, 2, bytes(SECRET_BYTES))
        states = [SharedState(memory, 2, index, "", 2) for index in range(2)]
        first, second = (Admission(10, state.live_counts, state.index, 2) for state in states)
        async with first.admit(10, 0):
            with pytest.raises(ApiError):
                await second.admit(1, 0).__aenter__()
            async with second.admit(5, 1):
                with pytest.raises(ApiError):
                    await first.admit(1, 1).__aenter__()
                assert (first.num_live, second.num_live, sum(states[0].live_counts)) == (10, 5, 15)
                states[0].forget_live(0)
                assert (first.num_live, second.num_live) == (0, 5)
                states[0].live_counts[0] = 10
        assert states[0].num_loading == 2
        states[1].has_loaded[1] = 1
        assert (states[0].num_loading, states[0].secret) == (1, bytes(SECRET_BYTES))

    asyncio.run(run())


@pytest.mark.essential
def test_request_of_one_key_for_all_places_does_not_lock_out_another_key(llm):
    async def run():
        async with client_of(llm, max_waiting_requests=50) as asking:

            def ask(key, count, max_tokens):
                body = {"prompt": ["Hello"] * count, "max_tokens": max_tokens, "ignore_eos": True}
                return asking.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})

            limit = asking.admission.max_live
            greedy = asyncio.create_task(ask("a", limit, 8))

            async def is_admitted():
                return asking.admission.num_live == limit

            await eventually(is_admitted, 30)
            assert (await ask("a", 1, 1)).status_code == 429
            assert (await ask("b", 1, 1)).status_code == 200
            assert not greedy.done(), "the other key has its turn before the requests of this one have ended"
            assert (await greedy).status_code == 200

    asyncio.run(run())


def test_request_for_which_the_core_has_no_memory_may_be_repeated_later():
    error = NoRoomError("no room for a request of 9 bytes: ...; wait until some of them have ended")
    response = as_api_error(error).response()
    assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
    assert b'"code":"too_many_requests"' in response.body
