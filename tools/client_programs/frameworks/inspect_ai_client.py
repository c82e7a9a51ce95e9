"""inspect-ai: an evaluation of two samples, and one with a tool."""

import os
import tempfile

import inspect_ai
from checks import BASE_URL, KEY, MODEL, TEXT, check, run
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

os.environ["INSPECT_LOG_DIR"] = tempfile.mkdtemp()
CONFIG = GenerateConfig(max_tokens=40, max_retries=0)


@tool
def add() -> Tool:
    async def execute(x: int, y: int) -> str:
        """Add two numbers.

        Args:
            x: First number.
            y: Second number.
        """
        return str(x + y)

    return execute


def evaluate(model: str, *solvers: object) -> None:
    served = get_model(model, base_url=BASE_URL, api_key=KEY, config=CONFIG)
    task = inspect_ai.Task(
        dataset=[Sample(input=TEXT, target="a"), Sample(input="2+2?", target="4")],
        solver=[*solvers, generate(tool_calls="single")],
        scorer=includes(),
    )
    (log,) = inspect_ai.eval(task, model=served, display="none")
    assert log.status == "success", log.error


check("evaluation as openai")(lambda: evaluate(f"openai/{MODEL}"))
check("evaluation as openai-api")(lambda: evaluate(f"openai-api/local/{MODEL}"))
check("evaluation with a tool")(lambda: evaluate(f"openai-api/local/{MODEL}", use_tools(add())))

run()
