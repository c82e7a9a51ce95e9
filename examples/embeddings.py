"""Embed texts, and rank them by their similarity to a question.

python examples/embeddings.py [MODEL]
"""

import sys

from vllm_mp import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "all-minilm-l6-v2"
QUESTION = "How far away is the moon?"
TEXTS = [
    "The average distance between the Earth and the Moon is 384,400 km.",
    "Cheese is made of milk.",
    "Astronauts needed three days to get to the Moon.",
]

with LLM(MODEL) as llm:
    (output,) = llm.embed(QUESTION)
    print(f"{len(output.outputs.embedding)} numbers, the first {output.outputs.embedding[0]:.4f}")

    scores = [output.outputs.score for output in llm.score(QUESTION, TEXTS)]
    for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
        print(f"{score:6.3f}  {text}")
