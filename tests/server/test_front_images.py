"""Images that reach one core through several server processes."""

import base64
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.engine_fixtures import SLOW_STEPS
from support.image_models import IMAGE_TOKEN, file_of, image_tokenizer, picture, save_processor
from support.server_process import served

from vllm_mp.testing.image_models import save_image_model

IMAGES = [f"data:image/png;base64,{base64.b64encode(file_of(picture(50, 40, seed))).decode()}" for seed in range(3)]


def save_model(folder):
    tokenizer = image_tokenizer()
    sizes = {"vocab_size": -(-len(tokenizer) // 8) * 8, "max_position_embeddings": 1024}
    save_image_model("smolvlm", folder, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN), **sizes)
    save_processor(folder, "smolvlm")


@pytest.mark.slow
def test_questions_about_images_continue_through_two_front_processes_after_a_kill_of_their_core(tmp_path):
    save_model(tmp_path / "model")
    flags = ("--max-model-len", "1024", "--api-server-count", "2", "--fault-injection", SLOW_STEPS)
    with served(tmp_path / "model", tmp_path, *flags) as server:
        server.wait_until_ready()

        def ask(url):
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 100, "temperature": 0}
            status, answer = server.post("/v1/chat/completions", {**body, "ignore_eos": True})
            assert status == 200, answer
            return answer["choices"][0]["message"]["content"]

        expected = [ask(url) for url in IMAGES]
        with ThreadPoolExecutor(12) as threads:
            answers = [threads.submit(ask, url) for url in 4 * IMAGES]
            server.wait_for(lambda: server.get("/core_status")[1]["num_running"] >= 3)
            os.kill(server.core_pid(), signal.SIGKILL)
            assert [answer.result() for answer in answers] == 4 * expected
        assert server.get("/core_status")[1]["restarts"] == 1
