"""A client that connects takes from a core a tokenizer's data, and neither code nor paths."""

import json
from pathlib import Path

import jinja2
import msgspec
import pytest
from support.fake_core import FakeCore
from support.tiny_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast

from vllm_mp import AsyncLLM, EngineArgs
from vllm_mp.model_store.tokenizer_files import CHUNK_BYTES, LIST_CALL, MAX_TOKENIZER_BYTES, READ_CALL, TokenizerFiles

TEXT = "The quick brown fox 123 <end> 😀"


@pytest.fixture
def folder(tmp_path):
    """A tokenizer's folder."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ eos_token }}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def connect(default_model, tmp_path, folder):
    """A function that connects to a core that names `folder`; options change what the core says."""
    started = []

    def make(answers=None, own=None, trusts=False, **model):
        config = EngineArgs(model=str(default_model)).create_engine_config()
        config.model_config = msgspec.structs.replace(config.model_config, tokenizer=str(folder), **model)
        files = TokenizerFiles(str(folder))
        answers = {LIST_CALL: files.sizes, READ_CALL: files.read, **(answers or {})}
        address = f"ipc://{tmp_path}/{len(started)}.sock"
        started.append(FakeCore(address, config, answers))
        started.append(AsyncLLM.connect(address, tokenizer=own, trust_remote_code=trusts))
        return started[-1]

    yield make
    for each in reversed(started):
        each.shutdown() if isinstance(each, AsyncLLM) else each.close()


def add_code(folder: Path) -> Path:
    """Add Python code to a tokenizer that writes a file when it runs; return the path of that file."""
    trace = folder.parent / "code ran"
    (folder / "mine.py").write_text(
        f"open({str(trace)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast\n\n"
        "class Mine(PreTrainedTokenizerFast):\n    pass\n"
    )
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    path.write_text(json.dumps(settings))
    return trace


@pytest.mark.parametrize("mode", ["auto", "slow"])
def test_code_that_a_core_names_does_not_run_though_the_core_trusts_it(connect, folder, mode):
    trace = add_code(folder)
    llm = connect(trust_remote_code=True, tokenizer_mode=mode)
    assert llm.get_tokenizer()("fox").input_ids
    assert not trace.exists()
    assert not llm.model_config.trust_remote_code


def test_own_tokenizer_runs_its_code_only_if_the_client_trusts_it(connect, folder):
    trace = add_code(folder)
    assert type(connect(own=str(folder)).get_tokenizer()).__name__ != "Mine"
    assert not trace.exists()
    assert type(connect(own=str(folder), trusts=True).get_tokenizer()).__name__ == "Mine"


def test_trust_without_an_own_tokenizer_is_refused(connect):
    with pytest.raises(ValueError, match="needs `tokenizer`"):
        connect(trusts=True)


def test_settings_that_name_files_have_no_effect(connect, folder, tmp_path):
    """Each of them would make the library open a file that the core has chosen."""
    expected = PreTrainedTokenizerFast.from_pretrained(folder)
    named = str(tmp_path / "named")
    hostile = {
        "gguf_file": named,
        "tokenizer_file": named,
        "vocab_file": named,
        "fast_tokenizer_files": ["../named"],
        "name_or_path": named,
        "init_inputs": [named],
        "vocab": {"x": 0},
        "merges": [],
    }
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | hostile))
    received = connect().get_tokenizer()
    assert received(TEXT).data == expected(TEXT).data
    assert named not in str(received.init_kwargs)


def test_received_tokenizer_is_the_one_of_the_core(connect, folder):
    expected = PreTrainedTokenizerFast.from_pretrained(folder)
    received = connect().get_tokenizer()
    assert received(TEXT).data == expected(TEXT).data
    assert received.decode(expected(TEXT).input_ids) == expected.decode(expected(TEXT).input_ids)
    assert received.special_tokens_map == expected.special_tokens_map
    messages = [{"role": "user", "content": "hi"}]
    assert received.apply_chat_template(messages, tokenize=False) == "hi<end>"


def test_template_of_the_processor_arrives_where_the_tokenizer_has_none(connect, folder):
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert connect().get_tokenizer().chat_template == "of the processor"


def test_file_arrives_in_pieces(connect, folder):
    path = folder / "chat_template.jinja"
    path.write_text("{# " + "x" * (2 * CHUNK_BYTES) + " #}end")
    assert connect().get_tokenizer().chat_template == path.read_text()


def test_chat_templates_of_a_core_run_in_a_sandbox(connect, folder, tmp_path):
    hostile = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (folder / "chat_template.jinja").write_text(hostile)
    for llm in (connect(), connect(chat_template=hostile)):
        with pytest.raises(jinja2.exceptions.SecurityError):
            llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_chat_template_that_a_core_gives_as_a_path_is_not_opened(connect, tmp_path):
    (tmp_path / "secret").write_text("secret")
    assert connect(chat_template=str(tmp_path / "secret")).get_tokenizer().chat_template == str(tmp_path / "secret")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({LIST_CALL: lambda: None}, "no list"),
        ({LIST_CALL: lambda: {"../../x": 3}}, "no list"),
        ({LIST_CALL: lambda: {"tokenizer.json": -1}}, "no list"),
        ({LIST_CALL: lambda: {"tokenizer.json": MAX_TOKENIZER_BYTES + 1}}, "the limit"),
        ({LIST_CALL: lambda: {"tokenizer_config.json": 0}}, "no tokenizer.json"),
        ({READ_CALL: lambda name, offset: b""}, "not announced"),
        ({READ_CALL: lambda name, offset: "text"}, "not announced"),
        ({READ_CALL: lambda name, offset: b"x" * (CHUNK_BYTES + 1)}, "not announced"),
        ({LIST_CALL: lambda: {"tokenizer.json": 2}, READ_CALL: lambda name, offset: b"{}"}, "cannot load"),
    ],
)
def test_anything_but_a_tokenizer_is_refused_with_the_remedy(connect, answers, words):
    with pytest.raises(ValueError, match=rf"{words}.*--tokenizer"):
        connect(answers)


@pytest.mark.parametrize("arguments", [("../config.json", 0), ("config.json", 0), ("tokenizer.json", -1), (3, 0)])
def test_core_sends_no_other_file(folder, arguments):
    with pytest.raises(ValueError, match="must be"):
        TokenizerFiles(str(folder)).read(*arguments)


def test_digest_changes_with_each_file(folder):
    before = TokenizerFiles(str(folder)).digest()
    assert TokenizerFiles(str(folder)).digest() == before
    (folder / "chat_template.jinja").write_text("other")
    assert TokenizerFiles(str(folder)).digest() != before
