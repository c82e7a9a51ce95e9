"""Put an engine behind an endpoint of your own, with FastAPI. A client that hangs up aborts its request.

pip install fastapi
python examples/http_server.py [MODEL] [PORT]
curl 'http://127.0.0.1:8000/generate?prompt=Once+upon+a+time'

`vllm-mp serve` is the whole server with OpenAI's API.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from vllm_mp import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
PORT = int(sys.argv[2]) if len(sys.argv) > 2 else 8000


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with await AsyncLLM.start(AsyncEngineArgs(model=MODEL)) as app.state.llm:
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/generate")
async def generate(prompt: str, max_tokens: int = 64) -> StreamingResponse:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)

    async def text() -> AsyncIterator[str]:
        async for output in app.state.llm.generate(prompt, params):
            yield output.outputs[0].text

    return StreamingResponse(text(), media_type="text/plain")


uvicorn.run(app, port=PORT)
