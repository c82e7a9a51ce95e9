"""The errors that a new user meets: each is one line with what is wrong, the value and the remedy."""

import json
import sys

import pytest

from vllm_mp import PoolingParams, SamplingParams, cli
from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.engine.input_processor import check_sampling_params
from vllm_mp.client.prompts.prompt import parse_prompt
from vllm_mp.errors import (
    ConstraintError,
    EngineGenerateError,
    EngineStartError,
    RequestInterruptedError,
    TooManyConstraintsError,
)
from vllm_mp.model_store import resolve_model
from vllm_mp.server.http.errors import as_api_error

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
ENCODER = LLAMA | {"architectures": ["BertModel"], "model_type": "bert"}


def raised(call, *args, **kwargs):
    """Return the error of a call."""
    with pytest.raises((ValueError, TypeError, OSError, EngineStartError)) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A function that writes a model's folder without weights; no core may start, and standard input is closed."""
    monkeypatch.setattr(sys, "stdin", None)

    def refuse(*_args, **_kwargs):
        raise AssertionError("a core was started")

    def write(config=LLAMA, tokenizer_config=None):
        folder = tmp_path / "tiny"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config or {}))
        return str(folder)

    monkeypatch.setattr(AsyncLLM, "from_vllm_config", refuse)
    return write


@pytest.mark.parametrize("command", [["chat"], ["generate", "--chat", "Hi"]], ids=["chat", "generate"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA, "has no chat template; give one with --chat-template, or use `vllm-mp generate` without --chat"),
        (
            ENCODER,
            "is an encoder, which generates no text; name another model, or use `vllm-mp serve` for vectors",
        ),
    ],
)
def test_a_model_that_cannot_chat_is_refused_before_a_core_starts(command, config, message, model, capsys):
    folder = model(config)
    assert cli.main([*command, "--model", folder, "--load-format", "dummy"]) == 2
    assert capsys.readouterr().err == f"vllm-mp: {folder} {message}\n"


def test_an_encoder_is_refused_for_a_prompt_before_a_core_starts(model, capsys):
    assert cli.main(["generate", "Hi", "--model", model(ENCODER), "--load-format", "dummy"]) == 2
    assert "is an encoder, which generates no text; name another model" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja", "--chat-template"])
def test_a_chat_template_is_found_wherever_it_may_be(where, model, tmp_path):
    folder = model(tokenizer_config={"chat_template": "{{ 1 }}"} if where.startswith("tokenizer") else None)
    if where == "chat_template.jinja":
        (tmp_path / "tiny" / where).write_text("{{ 1 }}")
    flags = ["--chat-template", "{{ 1 }}"] if where.startswith("--") else []
    with pytest.raises(AssertionError, match="a core was started"):
        cli.main(["chat", "--model", folder, "--load-format", "dummy", *flags])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([{"role": "user", "content": "x"}], "got a list of dicts; for chat messages use chat()"),
        ({"role": "user", "content": "x"}, "a prompt has no field 'content'; for chat messages use chat()"),
        ({"text": "x"}, "a prompt has no field 'text'; give 'prompt' or 'prompt_token_ids'"),
        (["a", "b"], "got a list of texts; pass each text to a call of its own"),
        (7, "prompt must be a text, token ids or a dict, got int"),
        (b"x", "the prompt is bytes; decode it to str first"),
        (None, "the prompt has neither text nor token ids; give one of them"),
    ],
)
def test_a_prompt_of_another_form_is_refused_with_the_forms_that_are_allowed(prompt, message):
    assert message in str(raised(parse_prompt, prompt))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 0}, "got dict; pass SamplingParams(**the_dict)"),
        (PoolingParams(), "got PoolingParams; call encode() for a vector"),
        ("0", "got str; pass SamplingParams("),
    ],
)
def test_other_sampling_params_are_refused_with_the_remedy(params, message):
    error = raised(check_sampling_params, params)
    assert isinstance(error, TypeError)
    assert f"sampling_params must be SamplingParams, {message}" in str(error)
    check_sampling_params(SamplingParams())
    check_sampling_params(None)


@pytest.mark.parametrize("address", ["localhost:8000", "http://localhost:8000", "/tmp/core.sock", ""])
def test_a_malformed_address_is_refused_with_the_allowed_forms(address):
    message = str(raised(CoreConnection, address))
    assert message == f"the address must be ipc:///PATH/TO/SOCKET or tcp://HOST:PORT, got {address!r}"


def test_an_address_where_nothing_listens_is_answered_with_the_command_that_starts_an_engine(tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    message = str(raised(AsyncLLM.connect, address, timeout=0.05))
    assert message == f"there is no core at {address}; is the engine running? (vllm-mp engine --listen {address})"


def test_an_address_without_an_answer_is_refused_with_the_command_that_starts_an_engine(tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    connection = CoreConnection(address)
    try:
        message = str(raised(connection.greet, 0.1, lambda: None))
    finally:
        connection.close()
    assert "did not answer within 0.1 s; is the engine running? (vllm-mp engine --listen ipc://" in message


@pytest.mark.parametrize("name", ["smolm2", "smollm2", "SmolLM2-135M", "smollm-135m-instruct"])
def test_a_misspelt_alias_is_refused_with_the_alias(name):
    assert str(raised(resolve_model, name)).endswith("; did you mean `smollm2-135m-instruct`?")


def test_a_model_unlike_any_alias_is_refused_without_a_suggestion():
    assert "did you mean" not in str(raised(resolve_model, "gpt-neo"))
    assert "did you mean" not in str(raised(resolve_model, "HuggingFaceTB/SmolLM2-none"))


def test_a_misspelt_path_is_refused_with_the_path_beside_it(tmp_path):
    (tmp_path / "llama.gguf").touch()
    message = str(raised(resolve_model, f"{tmp_path}/lama.gguf"))
    assert message.endswith(f"no such file or folder; correct the path; did you mean `{tmp_path}/llama.gguf`?")


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        (
            ["--max-model-len", "65"],
            "max_model_len=65 is longer than the context of MODEL, 64 tokens; set it to at most",
        ),
        (["--max-model-len", "-1"], "max_model_len=-1 is not served: the longest context that fits into the memory"),
        (["--max-model-len", "auto"], "max_model_len=-1 is not served: the longest context that fits into the memory"),
        (["--max-model-len", "1"], "max_model_len must be at least 2, got 1"),
        (["--max-model-len", str(2**70)], f"max_model_len must be at least 2 and at most {2**63 - 1}, got {2**70}"),
        (["--gpu-memory-utilization", "nan"], "gpu_memory_utilization must be at least 0.01 and at most 1.0, got nan"),
        (["--chat-template", "none.jinja"], "chat_template='none.jinja' is neither a Jinja template nor a file"),
        (["--key-file", "x"], "--key-file needs --connect ADDRESS; add it, or leave out --key-file"),
        (["--temperature", "-1"], "temperature must be"),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_line_with_exit_code_2(command_line, message, model, capsys):
    folder = model()
    assert cli.main(["chat", "--model", folder, "--load-format", "dummy", *command_line]) == 2
    error = capsys.readouterr().err
    assert message in error.replace(folder, "MODEL")
    assert error.count("\n") == 1


def test_server_answers_too_many_constraints_with_429_and_a_bad_one_with_400():
    too_many = as_api_error(TooManyConstraintsError("too many constraints are being compiled"))
    assert (too_many.status, too_many.code, too_many.type) == (429, "too_many_constraints", "rate_limit_error")
    assert too_many.headers == {"Retry-After": "1"}
    invalid = as_api_error(ConstraintError("at /items: no"))
    assert (invalid.status, invalid.code) == (400, "invalid_constraint")


def test_server_lets_clients_repeat_a_request_that_was_interrupted_and_none_that_failed():
    interrupted = as_api_error(RequestInterruptedError("the model's files have changed; send it again")).response()
    assert (interrupted.status_code, interrupted.headers.get("x-should-retry")) == (503, None)
    failed = as_api_error(EngineGenerateError("it killed two cores")).response()
    assert (failed.status_code, failed.headers["x-should-retry"]) == (500, "false")
