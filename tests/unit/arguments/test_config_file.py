"""Options in a YAML file, and sizes with units."""

import pytest

from vllm_mp import cli
from vllm_mp.arguments.config_file import flags_in
from vllm_mp.arguments.sizes import byte_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("123", 123),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("1.5Ki", 1536),
        ("512MB", 512_000_000),
        ("2k", 2000),
        (".5T", 5 * 10**11),
        ("7B", 7),
    ],
)
def test_size_has_the_unit_that_people_write(text, expected):
    assert byte_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "4 GiB x", "-1", "1e9", "4iB", "4PB"])
def test_text_that_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="write it as 4GiB, 512MB or a number of bytes"):
        byte_size(text)


@pytest.fixture
def parse(tmp_path):
    """A function that parses the flags of `vllm-mp serve` with a file of this content."""

    def parse(content, *flags):
        file = tmp_path / "a b.yaml"
        file.write_text(content)
        return cli.parser().parse_args(["serve", "--config", str(file), *flags])

    return parse


def test_file_has_flags_which_the_command_line_replaces(parse):
    content = """
        # a comment
        model: m
        max_model_len: 77
        port: 9
        kv-cache-memory-bytes: 1GiB
        enforce-eager: true
        enable-prefix-caching: false
        api-key: [a, b]
        override-generation-config: {temperature: 0.5}
        seed:
    """
    args = parse(content, "--port=10", "--no-enforce-eager")
    assert (args.model, args.max_model_len, args.port, args.kv_cache_memory_bytes) == ("m", 77, 10, 2**30)
    assert (args.enforce_eager, args.enable_prefix_caching, args.api_key) == (False, False, ["a", "b"])
    assert args.override_generation_config == {"temperature": 0.5}
    assert parse("api-key: a", "--api-key", "c").api_key == ["c"]


@pytest.mark.parametrize("content", ["api-key: [a]", "api-key: [-a, -b]", "max-num-seqs: 5", "enforce-eager: true"])
def test_file_leaves_the_model_of_the_command_line_to_it(tmp_path, content):
    file = tmp_path / "options.yaml"
    file.write_text(content)
    args = cli.parser().parse_args(["serve", "m", "--config", str(file)])
    name, _, value = content.partition(": ")
    assert args.served_model == "m"
    assert str(getattr(args, name.replace("-", "_"))).replace("'", "").lower() == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-modellen: 5", "there is no option 'max-modellen'"),
        ("- a", "it must map names of options to values, got list"),
        ("a: [", "it is not YAML"),
        ("max-num-seqs: true", "'max-num-seqs' takes a value; put a word such as yes or off in quotes, got true"),
        ("served-model-name: no", "'served-model-name' takes a value"),
        ("enforce-eager: 1", "'enforce-eager' takes true or false, got 1"),
        ("port: x", "--port must be an integer, such as 4096, 32k or 32K, got 'x'"),
        ("kv-cache-memory-bytes: 1XB", "must be a size in bytes, such as 4GiB or 512MB, got '1XB'"),
    ],
)
def test_wrong_file_is_refused_with_its_name_and_the_option(parse, capsys, content, message):
    with pytest.raises(SystemExit):
        parse(content)
    assert message in capsys.readouterr().err


def test_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.yaml: No such file or directory; name a file"):
        flags_in(str(tmp_path / "nothing.yaml"), {}, set())
