"""Run the programs of other projects that talk to the server, each in an environment of its own, and print a table.

    vllm-mp serve smollm2-135m-instruct
    python tools/quality/clients.py ~/clients                    # all, environments in this folder
    python tools/quality/clients.py ~/clients langchain litellm  # these

The programs are in tools/client_programs; each prints a line for each thing that a user does with the client. An
environment that exists is used again. Programs in JavaScript need node and npm. The exit code is 1 if a check failed.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PROGRAMS = Path(__file__).resolve().parents[1] / "client_programs"
LIMIT_S = 600


class Client(NamedTuple):
    """A client: its program in `PROGRAMS`, and the packages that it needs, the first of which gives the version."""

    program: str
    packages: tuple[str, ...]


CLIENTS = {
    "openai": Client("libraries/openai_client.py", ("openai", "pydantic")),
    "anthropic": Client("libraries/anthropic_client.py", ("anthropic",)),
    "langchain": Client("frameworks/langchain_client.py", ("langchain-openai", "langchain-anthropic")),
    "llama-index": Client("frameworks/llama_index_client.py", ("llama-index-llms-openai-like",)),
    "litellm": Client("libraries/litellm_client.py", ("litellm",)),
    "dspy": Client("frameworks/dspy_client.py", ("dspy",)),
    "instructor": Client("libraries/instructor_client.py", ("instructor",)),
    "pydantic-ai": Client("frameworks/pydantic_ai_client.py", ("pydantic-ai-slim", "openai")),
    "openai-agents": Client("frameworks/openai_agents_client.py", ("openai-agents",)),
    "inspect-ai": Client("frameworks/inspect_ai_client.py", ("inspect-ai", "openai")),
    "smolagents": Client("frameworks/smolagents_client.py", ("smolagents[openai]",)),
    "haystack": Client("frameworks/haystack_client.py", ("haystack-ai",)),
    "semantic-kernel": Client("frameworks/semantic_kernel_client.py", ("semantic-kernel",)),
    "autogen": Client("frameworks/autogen_client.py", ("autogen-agentchat", "autogen-ext[openai]")),
    "crewai": Client("frameworks/crewai_client.py", ("crewai",)),
    "agno": Client("frameworks/agno_client.py", ("agno", "openai")),
    "strands": Client("frameworks/strands_client.py", ("strands-agents[openai]",)),
    "griptape": Client("frameworks/griptape_client.py", ("griptape",)),
    "llm": Client("libraries/llm_client.py", ("llm",)),
    "mistralai": Client("libraries/mistralai_client.py", ("mistralai",)),
    "cohere": Client("libraries/cohere_client.py", ("cohere",)),
    "openai (npm)": Client("javascript/openai_client.mjs", ("openai",)),
    "anthropic (npm)": Client("javascript/anthropic_client.mjs", ("@anthropic-ai/sdk",)),
    "langchain (npm)": Client("javascript/langchain_client.mjs", ("@langchain/openai", "@langchain/core", "zod")),
    "Vercel AI SDK": Client("javascript/vercel_ai_client.mjs", ("ai", "@ai-sdk/openai-compatible", "zod")),
}


class Outcome(NamedTuple):
    """What a client did: its version, the checks that passed, and the lines of those that failed."""

    version: str
    passed: list[str]
    failed: list[str]


def main() -> int:
    """Run the clients and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the environments are")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"some of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, without /v1")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args()
    if unknown := [name for name in args.clients if name not in CLIENTS]:
        parser.error(f"unknown client {unknown[0]!r}; give some of {', '.join(CLIENTS)}")
    outcomes = {}
    for name in args.clients or CLIENTS:
        print(f"{name} …", file=sys.stderr, flush=True)
        outcomes[name] = outcome = run_client(CLIENTS[name], args.folder / name, args.url, args.model)
        for line in outcome.failed:
            print(f"{name}: {line}", file=sys.stderr, flush=True)
    print(table(outcomes))
    return any(outcome.failed for outcome in outcomes.values())


def run_client(client: Client, folder: Path, url: str, model: str) -> Outcome:
    """Install the client in `folder`, unless that is done, and run its program."""
    is_python = client.program.endswith(".py")
    try:
        command = (python_program if is_python else node_program)(client, folder)
        version = (python_version if is_python else node_version)(client, folder)
    except (subprocess.CalledProcessError, OSError) as error:
        return Outcome("", [], [f"FAILED installation: {error}"])
    try:
        done = subprocess.run(
            [*command, "--url", url, "--model", model],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(PROGRAMS),
                "HF_HUB_OFFLINE": "1",
                "OPENAI_API_KEY": "none",
                "DO_NOT_TRACK": "1",
            },
        )
        out, errors, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        return Outcome(version, [], [f"FAILED program: it did not end within {LIMIT_S} s"])
    (folder / "errors.log").write_text(errors)
    lines = out.splitlines()
    passed = [line.removeprefix("ok ") for line in lines if line.startswith("ok ")]
    failed = [line for line in lines if line.startswith("FAILED ")]
    if code and not failed:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        failed = [f"FAILED program: exit code {code}: {last}"]
    return Outcome(version, passed, failed)


def python_program(client: Client, folder: Path) -> list[str]:
    """Return the command of a program in Python, with its environment in `folder`."""
    python = folder / "bin/python"
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *client.packages], check=True)
        (folder / "installed").touch()
    return [str(python), str(PROGRAMS / client.program)]


def python_version(client: Client, folder: Path) -> str:
    """Return the version of the client's first package."""
    package = client.packages[0].partition("[")[0]
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.run(
        [folder / "bin/python", "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def node_program(client: Client, folder: Path) -> list[str]:
    """Return the command of a program in JavaScript, copied beside its packages in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "installed").exists():
        subprocess.run(
            ["npm", "install", "--silent", "--no-fund", "--no-audit", *client.packages], check=True, cwd=folder
        )
        (folder / "installed").touch()
    program = PROGRAMS / client.program
    for path in (program.with_name("checks.mjs"), program):
        shutil.copy(path, folder)
    return ["node", str(folder / program.name)]


def node_version(client: Client, folder: Path) -> str:
    """Return the version of the client's first package."""
    package = json.loads((folder / "node_modules" / client.packages[0] / "package.json").read_text())
    return str(package["version"])


def table(outcomes: dict[str, Outcome]) -> str:
    """Return the outcomes as a Markdown table."""
    lines = [
        f"Outcome on {datetime.date.today()}:",
        "",
        "| client | version | works | does not |",
        "| --- | --- | --- | --- |",
    ]
    for name, (version, passed, failed) in outcomes.items():
        names = [line.removeprefix("FAILED ").partition(":")[0] for line in failed]
        lines.append(f"| {name} | {version} | {'; '.join(passed)} | {'; '.join(names)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
