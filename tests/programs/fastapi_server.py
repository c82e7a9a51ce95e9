import json
import uuid

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from vllm_mp import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

app = FastAPI()

# Initialize engine at startup
engine_args = AsyncEngineArgs(model="microsoft/DialoGPT-medium")
engine = AsyncLLMEngine.from_engine_args(engine_args)


@app.post("/generate")
async def generate_text(prompt: str, max_tokens: int = 100):
    request_id = str(uuid.uuid4())
    sampling_params = SamplingParams(temperature=0.8, max_tokens=max_tokens)

    async def generate_stream():
        async for output in engine.generate(prompt, sampling_params, request_id):
            yield f"data: {json.dumps({'text': output.outputs[0].text})}\n\n"

    return StreamingResponse(
        generate_stream(),
        media_type="text/plain",
        headers={"Cache-Control": "no-cache"},
    )


@app.delete("/cancel/{request_id}")
async def cancel_request(request_id: str):
    await engine.abort(request_id)
    return {"message": "Request cancelled"}
