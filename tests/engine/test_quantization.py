"""8-bit weights in a real engine."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPTNeoXConfig

from vllm_mp import AsyncEngineArgs
from vllm_mp.testing.engines import answer, greedy
from vllm_mp.testing.prompts import PROMPTS
from vllm_mp.testing.random_models import save_config

pytestmark = pytest.mark.usefixtures("forked_programs")

TOOL = Path(__file__).resolve().parents[2] / "tools" / "quality" / "perplexity.py"


def test_int8_answers_are_batch_invariant_and_name_the_capital_of_france(make_engine):
    engine = make_engine(quantization="int8")

    async def run():
        together = await asyncio.gather(*(answer(engine, prompt, greedy(24)) for prompt in PROMPTS[:8]))
        alone = [await answer(engine, prompt, greedy(24)) for prompt in PROMPTS[:8]]
        assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in alone]
        paris = await answer(engine, "The capital of France is", greedy(4))
        assert "Paris" in paris.outputs[0].text

    asyncio.run(run())


@pytest.mark.slow
def test_int8_perplexity_is_within_3_percent_of_the_unquantized_model(tmp_path):
    text = tmp_path / "text"
    text.write_text(Path(__file__).with_name("test_cli.py").read_text()[:4000])
    done = subprocess.run(
        [sys.executable, str(TOOL), "--text", str(text), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    plain, int8 = json.loads(done.stdout)
    assert (plain["format"], int8["format"]) == ("bfloat16", "int8")
    assert plain["tokens"] == int8["tokens"] > 800
    assert 0 < abs(int8["percent_more"]) < 3
    assert 0 < int8["standard_error"] < 3
    assert int8["percent_more"] == pytest.approx(100 * (int8["perplexity"] / plain["perplexity"] - 1))


def test_int8_is_refused_by_name_for_the_transformers_backend(tmp_path):
    folder = save_config(GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"]), tmp_path)
    args = AsyncEngineArgs(str(folder), load_format="dummy", skip_tokenizer_init=True, quantization="int8")
    with pytest.raises(ValueError, match=r"quantization='int8' .*GPTNeoXForCausalLM"):
        args.create_engine_config()
