"""dspy, with answers of a type."""

import dspy
from checks import BASE_URL, JOBS, KEY, MODEL, TEXT, check, run

lm = dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, max_tokens=200, cache=False)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())


class WhatJob(dspy.Signature):
    """Tell the job of a person."""

    text: str = dspy.InputField()
    job: JOBS = dspy.OutputField()


@check("a call of the model")
def call() -> None:
    assert lm(TEXT)


@check("a prediction of a type")
def predict() -> None:
    assert dspy.Predict(WhatJob)(text=TEXT).job in ("baker", "teacher")


run()
