"""The endpoint /v1/completions."""

import asyncio

import httpx

from vllm_mp.server.app import build_app
from vllm_mp.server.options import ServerOptions


def _post(llm, body):
    """Return the answer of the application in this process."""

    async def ask():
        transport = httpx.ASGITransport(build_app(llm, ServerOptions()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions", json=body)

    return asyncio.run(ask())


def test_stream_brings_the_same_text_as_a_single_response(llm):
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    text = _post(llm, body).json()["choices"][0]["text"]
    lines = _post(llm, {**body, "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    pieces = [httpx.Response(200, content=line.removeprefix("data: ")).json() for line in lines[:-2]]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text
