"""Record the answers that the replay core replays: token ids of the default model, of prompts in many languages.

    python tools/recordings/record_answers.py

Writes `vllm_mp/replay_core/answers.npy`, uint16 [answers, tokens]. Seeds are fixed, so the same model on the same
kernels gives the same file. Answers go on past the end of the text, so that all have the same length.
"""

import argparse
import asyncio
from pathlib import Path

import numpy as np

from vllm_mp import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams
from vllm_mp.cli.chat_text import chat_prompt

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 256

QUESTIONS = (
    "Tell me a story about a fox who wants to see the sea.",
    "Write a Python function that merges two sorted lists, with a docstring and tests.",
    "Explain how a bicycle stays upright.",
    "List twenty emoji with their meanings, one per line.",
    "Write a cheerful birthday message full of emoji 🎉🎂🥳 for a friend.",
    "Translate into Japanese: The weather is beautiful today, and we are going to the mountains.",
    "用中文写一首关于月亮的短诗。",
    "Напиши короткую сказку о медведе и пчёлах.",
    "Écris une lettre à un ami pour l'inviter à dîner, avec les accents.",
    "¿Cuáles son las capitales de los países de América del Sur?",
    "Schreibe ein kurzes Märchen über einen Bären, der Bücher über Brücken schätzt.",
    "اكتب فقرة قصيرة عن البحر.",
    "日本の四季について説明してください。",
    "한국의 전통 음식에 대해 설명해 주세요.",
    "Write a JSON document that describes three books, with nested authors.",
    "Give the steps to make tea in the style of a pirate, with a 🏴‍☠️ at the start of each line.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "vllm_mp/replay_core/answers.npy")
    parser.add_argument("--per-prompt", type=int, default=4, help="answers of each prompt (default: %(default)s)")
    args = parser.parse_args()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(max_model_len=2048, disable_log_requests=True))
    try:
        answers = asyncio.run(_answers(llm, args.per_prompt))
    finally:
        llm.shutdown()
    np.save(args.output, np.asarray(answers, np.uint16), allow_pickle=False)
    print(f"{len(answers)} answers of {NUM_TOKENS} tokens in {args.output}")


async def _answers(llm: AsyncLLM, per_prompt: int) -> list[list[int]]:
    """Return the token ids of `per_prompt` answers to each question; the first of each is greedy."""

    async def answer(question: str, index: int) -> list[int]:
        params = SamplingParams(
            temperature=0.8 if index else 0.0,
            seed=index,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = chat_prompt(llm, [{"role": "user", "content": question}])
        async for output in llm.generate(prompt, params):
            last = output
        return last.outputs[0].token_ids

    return await asyncio.gather(*(answer(question, index) for question in QUESTIONS for index in range(per_prompt)))


if __name__ == "__main__":
    main()
