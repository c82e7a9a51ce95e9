"""The command and library `llm`, with the server in its extra-openai-models.yaml."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(folder)

from checks import BASE_URL, KEY, MODEL, TEXT, check, run  # noqa: E402

(folder / "extra-openai-models.yaml").write_text(f"""
- model_id: here
  model_name: {MODEL}
  api_base: {BASE_URL}
  api_key_name: here
  supports_schema: true
  supports_tools: true
- model_id: here-completion
  model_name: {MODEL}
  api_base: {BASE_URL}
  api_key_name: here
  completion: true
""")
(folder / "keys.json").write_text(f'{{"here": "{KEY}"}}')

import llm  # noqa: E402

model = llm.get_model("here")


def save_person(name: str, age: int) -> str:
    """Save a person."""
    return "saved"


@check("prompt, plain and streamed")
def prompt() -> None:
    assert model.prompt(TEXT, system="Answer in a word.", stream=False, max_tokens=20).text()
    answer = model.prompt(TEXT, system="Answer in a word.", max_tokens=20)
    assert "".join(answer)
    assert answer.usage().output


@check("conversation")
def conversation() -> None:
    talk = model.conversation()
    for text in (TEXT, "And Ben?"):
        assert talk.prompt(text, max_tokens=20).text()


@check("schema")
def schema() -> None:
    answer = model.prompt(TEXT, schema=llm.schema_dsl("name, age int"), max_tokens=200)
    assert "age" in answer.json() or answer.text().startswith("{")


@check("tools")
def tools() -> None:
    for stream in (False, True):
        assert list(model.chain(TEXT, tools=[save_person], stream=stream, options={"max_tokens": 50}))


@check("completion")
def completion() -> None:
    assert "".join(llm.get_model("here-completion").prompt("Once upon a time", max_tokens=8))


@check("the command")
def command() -> None:
    program = Path(sys.executable).with_name("llm")
    done = subprocess.run([program, "-m", "here", "-o", "max_tokens", "20", TEXT], capture_output=True, text=True)
    assert done.stdout.strip(), done.stderr


run()
