"""Images are encoded in slices, with the embeddings that they have if they are encoded at once."""

import threading
import weakref
from types import MethodType

import pytest
import torch

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.images import chunks
from vllm_mp.core.images.encoder import ImageEncoder
from vllm_mp.core.images.image_store import StoredImage
from vllm_mp.core.images.sliced_call import SlicedCall
from vllm_mp.core.worker.image_encodings import ImageEncodings, NoMemoryForImageError
from vllm_mp.testing.image_models import image_arrays, save_image_model


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "gemma3", "smolvlm"])
def encoder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_image_model(request.param, folder)
    config = AsyncEngineArgs(model=str(folder), skip_tokenizer_init=True).create_engine_config().model_config
    return ImageEncoder(config, torch.float32, torch.device("cpu"))


@pytest.fixture
def small_chunks(monkeypatch):
    for name, value in {"_MIN_ROWS": 4, "_THREAD_ROWS": 4, "_QUERIES": 5, "_THREAD_SCORES": 0}.items():
        monkeypatch.setattr(chunks, name, value)


def store(encoder, seed):
    image, _ = image_arrays(encoder._config, 1, seed)
    return StoredImage(image, encoder.shape_of(image), 4)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "image-encoding"]


def test_slices_of_two_images_give_the_embeddings_of_whole_encodings(encoder, small_chunks):
    beats = []
    encodings = ImageEncodings(encoder, lambda: beats.append(threading.current_thread().name))
    images, num_slices = [store(encoder, 1), store(encoder, 2)], 0
    expected = [encoder.encode(image.processed, 0, 1) for image in images]
    waiting = list(images)
    while waiting:
        waiting = [image for image in waiting if not encodings.advance(image, 0, seconds=0.0)]
        num_slices += 1
    assert num_slices > 10, "slices are smaller than the layers, of which no tower has more than three"
    assert len(beats) > num_slices
    assert set(beats) == {"image-encoding"}
    for image, embeddings in zip(images, expected, strict=True):
        assert torch.equal(torch.cat(image.embeddings(0, image.num_tokens)), embeddings)
    assert encodings.num_encoded == 2
    assert not threads()


def test_chunks_do_not_change_the_embeddings(encoder, monkeypatch):
    image = store(encoder, 1).processed
    whole, num_whole, num_chunks = encoder.encode(image, 0, 1), [], []
    encoder.encode(image, 0, 1, lambda: num_whole.append(1))
    for name, value in {"_MIN_ROWS": 4, "_THREAD_ROWS": 4, "_QUERIES": 5, "_THREAD_SCORES": 0}.items():
        monkeypatch.setattr(chunks, name, value)
    torch.testing.assert_close(encoder.encode(image, 0, 1, lambda: num_chunks.append(1)), whole)
    assert len(num_chunks) > 4 * len(num_whole)
    if encoder._config.merge_size:
        rotating = [part for part in encoder.module.modules() if isinstance(part.__dict__.get("forward"), MethodType)]
        assert len(rotating) == 3, "queries and keys of each layer are rotated in chunks too"


def test_encoding_that_is_given_up_ends_its_thread_and_can_begin_again(encoder, small_chunks):
    encodings = ImageEncodings(encoder, lambda: None)
    kept, given_up = store(encoder, 1), store(encoder, 2)
    for image in (kept, given_up):
        assert not encodings.advance(image, 0, seconds=0.0)
    assert len(threads()) == 2
    encodings.keep([(kept, 0)])
    assert len(threads()) == 1
    assert given_up.missing_tile(0, 1) == 0
    for image in (kept, given_up):
        assert encodings.advance(image, 0, seconds=1e9)
    assert not threads()


def test_error_of_an_encoding_is_raised_in_the_thread_of_the_core(encoder, small_chunks):
    def fail():
        raise RuntimeError("CUDA error: unspecified launch failure")

    encodings = ImageEncodings(encoder, fail)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        encodings.advance(store(encoder, 1), 0, seconds=1e9)
    assert not threads()


@pytest.mark.parametrize("may_pause", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory left"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_encoding_without_memory_leaves_nothing_and_others_go_on(encoder, small_chunks, monkeypatch, error, may_pause):
    class Computed:
        pass

    computed, num_beats = [], 0

    def fail():
        nonlocal num_beats
        num_beats += 1
        if num_beats == 3:
            of_this_frame = Computed()
            computed.append(weakref.ref(of_this_frame))
            raise error.with_traceback(None)

    monkeypatch.setattr(ImageEncoder, "may_pause", may_pause)
    encodings, image = ImageEncodings(encoder, fail), store(encoder, 1)
    with pytest.raises(NoMemoryForImageError, match=str(error)):
        encodings.advance(image, 0, seconds=1e9)
    error.__traceback__ = None  # the parameter keeps the error
    assert [each() for each in computed] == [None]
    assert not threads()
    assert encodings.advance(image, 0, seconds=1e9), "the next attempt begins again"


def test_sliced_call_stops_at_the_first_pause_point_after_its_time():
    now, seen = [0.0], []

    def count(pause):
        for number in range(6):
            now[0] += 1.0
            seen.append(number)
            pause()
        return "done"

    call = SlicedCall(count, "count", lambda: now[0])
    assert call.advance(0.0) == []
    assert seen == [0]
    assert call.advance(2.5) == []
    assert seen == [0, 1, 2, 3]
    assert call.advance(9.0) == ["done"]
    call.stop()
