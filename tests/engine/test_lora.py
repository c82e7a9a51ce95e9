"""LoRA adapters in a real engine, from the call to the model."""

import asyncio
import json
import shutil
import subprocess
import sys

import pytest
from support.lora_engines import ADAPTERS, LORA, PROMPT, save_adapters, tokens, tokens_of_all

from vllm_mp import EngineError, EngineGenerateError, LoRARequest, PoolingParams, SamplingParams
from vllm_mp.testing.adapters import adapter_tensors, save_adapter
from vllm_mp.testing.engines import answer, greedy, rest, running_engine

pytestmark = pytest.mark.usefixtures("forked_programs")

PARAMS = greedy(8, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(small_model, tmp_path_factory):
    return save_adapters(small_model, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def lora(small_model):
    """An engine with two slots, and room for three adapters in host memory."""
    with running_engine(small_model, **LORA, enable_prefix_caching=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(lora, adapters):
    """The token ids of each adapter alone."""

    async def alone():
        return {number: await tokens(lora, request, PARAMS) for number, request in adapters.items()}

    return asyncio.run(alone())


@pytest.fixture
def own(adapters, tmp_path):
    """A function that returns a request for a copy of an adapter, whose folder the test may change."""

    def copy(number, new_id):
        shutil.copytree(adapters[number].lora_path, tmp_path / f"copy-{new_id}")
        return LoRARequest(f"copy-{new_id}", new_id, str(tmp_path / f"copy-{new_id}"))

    return copy


@pytest.mark.essential
def test_each_adapter_changes_the_text_and_mixed_requests_get_what_they_get_alone(lora, adapters, expected):
    assert len(set(map(tuple, expected.values()))) == ADAPTERS + 1
    mixed = asyncio.run(tokens_of_all(lora, adapters, PARAMS, 3 * len(adapters)))
    assert mixed == [expected[i % len(adapters)] for i in range(len(mixed))]


def test_adapters_are_added_listed_pinned_and_removed(lora, adapters, own):
    first, second = own(1, 101), own(2, 102)

    async def run():
        assert await lora.add_lora(first)
        assert not await lora.add_lora(first)
        assert await lora.add_lora(second)
        assert {101, 102} <= await lora.list_loras()
        assert await lora.pin_lora(101)
        assert await lora.remove_lora(101)
        assert not await lora.remove_lora(101)
        with pytest.raises(EngineError, match="no adapter with id 101"):
            await lora.pin_lora(101)
        assert await lora.remove_lora(102)
        assert not {101, 102} & await lora.list_loras()

    asyncio.run(run())


def test_adapter_that_is_removed_while_requests_use_it_serves_them_to_their_ends(lora, adapters, expected, own):
    request = own(1, 103)

    async def run():
        await lora.add_lora(request)
        stream = lora.generate(
            PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), lora_request=request
        )
        await anext(stream)
        assert await lora.remove_lora(103)
        async for output in stream:
            last = output
        assert last.outputs[0].token_ids == expected[1]

    asyncio.run(run())


def test_weights_loaded_in_place_are_used_by_later_requests_and_find_no_cached_prefix_of_the_former(
    lora, adapters, expected, own
):
    request = own(1, 104)

    async def run():
        prompt = "word " * 40
        await tokens(lora, request, PARAMS, prompt)
        before = await tokens(lora, request, PARAMS, prompt)
        shutil.copytree(adapters[2].lora_path, request.lora_path, dirs_exist_ok=True)
        assert await tokens(lora, request, PARAMS, prompt) == before, "nothing is read again unasked"
        request.load_inplace = True
        assert await tokens(lora, request, PARAMS) == expected[2]
        request.load_inplace = False
        assert await tokens(lora, request, PARAMS, prompt) == await tokens(lora, adapters[2], PARAMS, prompt)

    asyncio.run(run())


def test_added_core_has_the_adapters_that_the_others_have_got_while_it_started(lora, own, monkeypatch):
    removed, added, late = own(1, 105), own(2, 106), own(3, 107)
    open_core, add_core = lora._engine.open_core, lora.cores.add_core

    async def change():
        await lora.remove_lora(105)
        await lora.add_lora(added)
        await lora.pin_lora(106)

    async def run():
        loop = asyncio.get_running_loop()
        await lora.add_lora(removed)

        def open_late(*args):
            supervisor = open_core(*args)
            asyncio.run_coroutine_threadsafe(change(), loop).result(60)
            loop.call_soon_threadsafe(lambda: under_way.append(asyncio.create_task(lora.add_lora(late))))
            return supervisor

        under_way, pages = [], []

        def add_and_look(supervisor, rank):
            pages.append(supervisor.core.page.adapters())
            add_core(supervisor, rank)

        monkeypatch.setattr(lora._engine, "open_core", open_late)
        monkeypatch.setattr(lora.cores, "add_core", add_and_look)
        rank = await lora.add_core()
        try:
            assert await under_way[0]
            former = lora.cores.first.supervisor.core.page.adapters()
            states = [
                {(a.id, a.digest, a.is_added, a.is_pinned) for a in page if a.is_added} for page in (former, *pages)
            ]
            assert states[0] == states[1]
            assert {106, 107} <= await lora.list_loras()
            assert 105 not in await lora.list_loras()
        finally:
            await lora.remove_core(rank)
            for number in (106, 107):
                await lora.remove_lora(number)

    asyncio.run(run())


def test_request_can_be_aborted_while_its_adapter_is_loaded_in_place(lora, own, monkeypatch):
    add = lora._adapters.add
    request = own(1, 41)
    request.load_inplace = True

    async def run():
        begun, aborted = asyncio.Event(), asyncio.Event()

        async def add_slowly(lora_request):
            begun.set()
            await aborted.wait()
            return await add(lora_request)

        monkeypatch.setattr(lora._adapters, "add", add_slowly)
        outputs = lora.generate(PROMPT, PARAMS, "loading", lora_request=request)
        running = asyncio.create_task(rest(outputs))
        await begun.wait()
        await lora.abort("loading")
        aborted.set()
        completion = await running
        assert (completion.finish_reason, completion.token_ids) == ("abort", [])
        assert await lora.remove_lora(41)

    asyncio.run(run())


def test_cached_prefix_belongs_to_one_adapter(lora, adapters):
    async def cached(request):
        async for output in lora.generate("apple " * 50, greedy(1), lora_request=request):
            last = output
        return last.num_cached_tokens

    async def run():
        assert [await cached(adapters[number]) for number in (0, 1, 2)] == [0, 0, 0]
        assert await cached(adapters[1]) > 0
        assert await cached(adapters[0]) > 0

    asyncio.run(run())


def bad_folder(kind, adapters, folder):
    """Make a folder that no engine can use, and return it with what the error says."""
    if kind == "folder":
        return folder / "nowhere", "is not a folder"
    shutil.copytree(adapters[1].lora_path, folder / "bad")
    weights, config = folder / "bad" / "adapter_model.safetensors", folder / "bad" / "adapter_config.json"
    if kind == "pickle":
        weights.rename(folder / "bad" / "adapter_model.bin")
        return folder / "bad", "a pickle"
    if kind == "rank":
        config.write_text(json.dumps({**json.loads(config.read_text()), "r": 64}))
        return folder / "bad", "above max_lora_rank=16"
    if kind == "shape":
        config.write_text(json.dumps({**json.loads(config.read_text()), "r": 4}))
        return folder / "bad", "has shape"
    if kind == "no config":
        config.unlink()
        return folder / "bad", "adapter_config.json"
    weights.write_bytes(b"\x80\x04 no tensors")
    return folder / "bad", "adapter_model.safetensors"


@pytest.mark.parametrize("kind", ["folder", "pickle", "rank", "shape", "no config", "damaged"])
def test_adapter_that_cannot_be_used_fails_its_requests_alone(lora, adapters, expected, tmp_path, kind):
    folder, words = bad_folder(kind, adapters, tmp_path)
    bad = LoRARequest("bad", 200, str(folder))

    async def run():
        others = asyncio.gather(*[tokens(lora, adapters[number], PARAMS) for number in (0, 1, 2)])
        with pytest.raises(EngineGenerateError, match=rf"adapter 'bad' \(id 200\) cannot be loaded: .*{words}"):
            await tokens(lora, bad, PARAMS)
        with pytest.raises(EngineError, match=words):
            await lora.add_lora(bad)
        assert await others == [expected[0], expected[1], expected[2]]
        assert 200 not in await lora.list_loras()

    asyncio.run(run())


def test_adapter_of_another_model_is_refused(lora, adapters, tmp_path):
    other = adapters_of_a_wider_model(tmp_path)

    async def run():
        with pytest.raises(EngineError, match="is it for another model"):
            await lora.add_lora(other)

    asyncio.run(run())


def adapters_of_a_wider_model(folder):
    from vllm_mp.model_config.families.registry import read_architecture
    from vllm_mp.testing.random_models import CONFIGS

    architecture = read_architecture(CONFIGS["llama"].to_dict())
    return LoRARequest("other", 201, str(save_adapter(folder / "other", adapter_tensors(architecture, 8))))


def test_id_of_another_adapter_is_refused_by_name(lora, adapters):
    async def run():
        await lora.add_lora(adapters[1])
        same_id = LoRARequest("another", 1, adapters[2].lora_path)
        with pytest.raises(
            EngineGenerateError, match="lora_int_id 1 belongs to the adapter with lora_name 'adapter-1'"
        ):
            await tokens(lora, same_id, PARAMS)
        with pytest.raises(EngineError, match="call add_lora with load_inplace=True"):
            await lora.add_lora(same_id)

    asyncio.run(run())


def test_vector_is_made_with_the_adapter(lora, adapters):
    async def vector(request):
        output = await anext(lora.encode(PROMPT, PoolingParams(), lora_request=request))
        return output.outputs.data.tolist()

    async def run():
        base, first, again = [await vector(adapters[number]) for number in (0, 1, 1)]
        assert base != first
        assert first == again

    asyncio.run(run())


@pytest.mark.parametrize("level", [1, 2])
def test_requests_continue_with_their_adapters_after_a_sleep(lora, adapters, expected, level):
    async def run():
        await lora.add_lora(adapters[1])
        streams = [asyncio.create_task(tokens(lora, adapters[number], PARAMS)) for number in range(ADAPTERS + 1)]
        await lora.sleep(level, mode="keep")
        assert 1 in await lora.list_loras()
        await lora.wake_up()
        assert [await stream for stream in streams] == list(expected.values())

    asyncio.run(run())


def test_adapter_uses_the_tokenizer_of_the_model(lora, adapters):
    async def run():
        assert await lora.get_tokenizer(adapters[1]) is lora.get_tokenizer()
        preprocessor = await lora.get_input_preprocessor()
        assert preprocessor.preprocess(PROMPT, None, adapters[1]) == preprocessor.preprocess(PROMPT)

    asyncio.run(run())


def test_engine_without_lora_refuses_adapters_by_name(llm, adapters):
    async def run():
        with pytest.raises(ValueError, match="lora_request names 'adapter-1', but LoRA is not enabled"):
            await tokens(llm, adapters[1], PARAMS)
        for call in (llm.add_lora(adapters[1]), llm.remove_lora(1), llm.list_loras(), llm.pin_lora(1)):
            with pytest.raises(ValueError, match="LoRA is not enabled; start the engine with enable_lora=True"):
                await call
        assert (await answer(llm, PROMPT, greedy(2))).lora_request is None

    asyncio.run(run())


@pytest.mark.parametrize("wrong", ["adapter", {"lora_name": "x"}, object()])
def test_value_that_is_no_lora_request_is_refused(lora, wrong):
    async def run():
        with pytest.raises(TypeError, match="lora_request must be a LoRARequest"):
            await tokens(lora, wrong, PARAMS)
        with pytest.raises(TypeError, match="lora_request must be a LoRARequest"):
            await lora.add_lora(wrong)
        with pytest.raises(TypeError, match="lora_id must be an int"):
            await lora.remove_lora("1")

    asyncio.run(run())


def test_generate_of_the_shell_answers_with_an_adapter(lora, adapters, small_model):
    flags = ("--model", str(small_model), "--dtype", "float32", "--kv-cache-memory-bytes", str(2**26))
    flags += ("--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--lora", f"mine={adapters[1].lora_path}")
    done = subprocess.run(
        [sys.executable, "-m", "vllm_mp.cli", "generate", PROMPT, *flags], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

    async def text():
        async for output in lora.generate(PROMPT, PARAMS, lora_request=adapters[1]):
            last = output
        return last.outputs[0].text

    assert done.stdout == asyncio.run(text()) + "\n"
