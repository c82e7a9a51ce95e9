"""The client of Cohere, which reranks and embeds."""

import cohere
from checks import KEY, MODEL, URL, check, run

DOCUMENTS = ["Paris is the capital of France.", "Bread is made of flour."]


@check("rerank of ClientV2")
def rerank() -> None:
    answer = cohere.ClientV2(api_key=KEY, base_url=URL).rerank(
        model=MODEL, query="What is the capital of France?", documents=DOCUMENTS, top_n=2
    )
    assert sorted(result.index for result in answer.results) == [0, 1]
    assert answer.results[0].relevance_score >= answer.results[1].relevance_score


@check("rerank of Client")
def rerank_v1() -> None:
    answer = cohere.Client(api_key=KEY, base_url=URL).rerank(
        model=MODEL, query="What is the capital of France?", documents=DOCUMENTS, top_n=1, return_documents=True
    )
    assert answer.results[0].document.text in DOCUMENTS


run()
