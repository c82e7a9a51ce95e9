"""For which engines the commands say that 8-bit weights are faster."""

import msgspec
import pytest
from support.tiny_gguf import write_tiny_gguf

from vllm_mp import AsyncEngineArgs
from vllm_mp.cli.smaller_weights import int8_hint
from vllm_mp.model_store.gguf import PLACE_FILE, MappedGguf
from vllm_mp.model_store.gguf_file.reader import read_gguf
from vllm_mp.testing.random_models import CONFIGS, save_config


def config_of(folder, **options):
    options = {"device": "cpu", "dtype": "bfloat16", **options}
    args = AsyncEngineArgs(str(folder), skip_tokenizer_init=True, load_format="dummy", **options)
    return args.create_engine_config()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_config(CONFIGS["llama"], tmp_path_factory.mktemp("model") / "llama")


def test_weights_in_16_bits_on_a_cpu_could_be_smaller(llama):
    assert int8_hint(config_of(llama)) == (
        "The weights are in bfloat16; --quantization int8 is faster and a little less accurate."
    )


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "int4"}, {"device": "cuda"}])
def test_nothing_is_said_of_smaller_weights_or_another_device(llama, options):
    assert int8_hint(config_of(llama, **options)) is None


def test_nothing_is_said_of_an_encoder(llama):
    config = config_of(llama)
    config.model_config.architecture = msgspec.structs.replace(config.model_config.architecture, is_encoder=True)
    assert int8_hint(config) is None


def test_nothing_is_said_of_weights_that_stay_in_a_gguf_file(llama, tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    place = MappedGguf.of(read_gguf(tmp_path / "tiny.gguf"))
    (tmp_path / PLACE_FILE).write_bytes(msgspec.json.encode(place))
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    assert int8_hint(config_of(tmp_path)) is None
