"""An image process: it decodes images and runs the model's image processor, one image at a time.

Run as `python -m vllm_mp.client.images.image_process`, by `ImageProcess`. It reads frames from its standard input until
that ends, and answers each on its standard output. It is apart from the client, because decoders crash, need much
memory or never end. It hides torch from transformers, whose processors then work with NumPy, so that it starts in a
fraction of the time and needs a fraction of the memory.
"""

import contextlib
import hashlib
import importlib
import json
import os
import resource
import sys
import threading
import time
from typing import IO, Any, Final

import msgspec

from vllm_mp.client.images.messages import HEADER, ImageJob, ImageResult, ProcessorSettings
from vllm_mp.client.images.pixels import check_size, open_image, rgb_of
from vllm_mp.requests.images import IMAGE_DTYPES, MAX_IMAGE_BYTES, ImageArray

_MAX_MEMORY_BYTES: Final = 4 * 2**30
"""Bound on the address space of the process."""
_HIDDEN: Final = ("torch", "torchvision", "tensorflow", "jax")
_MODULES: Final = {"Qwen2VL": "qwen2_vl"}
"""The modules of processors whose names differ from those of their classes by more than case."""
_MAX_VALUE: Final = 2.0**15
"""Bound on the values of arrays; those of usual options are below 300."""
_PARENT_LOOK_S: Final = 1.0
_SPLIT_SIZES: Final = ("rows", "cols")
"""What a processor says of the tiles of an image, beside its arrays."""


def main() -> None:
    """Answer jobs until the standard input ends, or the parent."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not get between the answers
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in _HIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    requests = sys.stdin.buffer
    if (first := _read_frame(requests)) is None:
        return
    settings = msgspec.msgpack.decode(first, type=ProcessorSettings)
    try:
        processor = _load_processor(settings)
    except Exception as error:
        _write_frame(answers, ImageResult(error=f"the model's image processor cannot be loaded: {error!r:.500}"))
        return
    with contextlib.suppress(BrokenPipeError):  # the client has ended
        _answer_jobs(processor, requests, answers)


def _end_with_parent(pid: int) -> None:
    """End the process soon after its parent `pid`, also while a decoder does not end."""
    while os.getppid() == pid:
        time.sleep(_PARENT_LOOK_S)
    os._exit(1)


def _answer_jobs(processor: Any, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Say that the process is ready, and answer jobs until there are no more."""
    _write_frame(answers, ImageResult())
    while (frame := _read_frame(requests)) is not None:
        job = msgspec.msgpack.decode(frame, type=ImageJob)
        del frame
        try:
            result = process(processor, job)
        except MemoryError:
            result = ImageResult(error="it needs too much memory; make it smaller, or change mm_processor_kwargs")
        except ValueError as error:
            result = ImageResult(error=str(error))
        except Exception as error:  # an end of the process would hold up the images that wait
            result = ImageResult(error=f"it cannot be processed: {error!r:.300}; use another image")
        _write_frame(answers, result)


def _load_processor(settings: ProcessorSettings) -> Any:
    """Return the image processor. Raises what transformers raises."""
    name = settings.processor.partition("ImageProcessor")[0]
    name = _MODULES.get(name, name.lower())
    # The class by its module: some versions of transformers say at the top that it needs torch, which it does not.
    module = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    return getattr(module, settings.processor)(**json.loads(settings.settings))


def process(processor: Any, job: ImageJob) -> ImageResult:
    """Return the arrays that `processor` makes of an image. Raises ValueError, with the cause and the remedy."""
    from PIL import Image

    if job.width:
        check_size(job.width, job.height)
        image = Image.frombytes("RGB", (job.width, job.height), job.data)
    else:
        image = rgb_of(open_image(job.data))
    options = json.loads(job.options)
    digest = hashlib.sha256(_identity(processor, options, image.size))
    digest.update(image.tobytes())
    splits = hasattr(processor, "split_images")
    try:
        made = processor([image], return_tensors="np", **options, **({"return_row_col_info": True} if splits else {}))
    except MemoryError:
        raise
    except Exception as error:
        remedy = "correct mm_processor_kwargs" if options else "use another image"
        raise ValueError(
            f"the model's image processor refuses it: {str(error) or repr(error):.300}; {remedy}"
        ) from None
    if "image_grid_thw" in made:
        made["pixel_values"] = _one_frame(made["pixel_values"], processor.temporal_patch_size)
    rows, columns = (int(made.pop(name)[0][0]) if name in made else 0 for name in _SPLIT_SIZES)
    if "num_crops" in made:  # of Gemma 3, beside the whole image
        rows, columns = 1, int(made.pop("num_crops")[0])
    arrays = [_array(name, value) for name, value in made.items()]
    num_bytes = sum(len(array.data) for array in arrays)
    if num_bytes > MAX_IMAGE_BYTES:
        raise ValueError(
            f"its arrays have {num_bytes} bytes, the limit is {MAX_IMAGE_BYTES}; make it smaller, or give a smaller "
            "size in mm_processor_kwargs"
        )
    return ImageResult(digest.digest(), arrays, rows, columns)


def _one_frame(patches: Any, num_frames: int) -> Any:
    """Return patches [n, 3 * size * size] of an image, which a processor of videos repeats for each frame."""
    frames = patches.reshape(len(patches), 3, num_frames, -1)
    return frames[:, :, 0].reshape(len(patches), -1)


def _identity(processor: Any, options: dict[str, Any], size: tuple[int, int]) -> bytes:
    """Return what, beside the pixels, decides the arrays of an image."""
    settings = json.loads(processor.to_json_string())
    return json.dumps([type(processor).__name__, settings, options, size], sort_keys=True).encode()


def _array(name: str, value: Any) -> ImageArray:
    """Return an array as the wire carries it. Raises ValueError for one that no model takes."""
    import numpy as np

    array = np.ascontiguousarray(value)
    if name.endswith("_mask"):
        array = array.astype(np.bool_)  # of an eighth of the size
    elif array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype.name not in IMAGE_DTYPES or array.ndim > 8:
        raise ValueError(f"the processor made {name} of {array.dtype}, which models cannot use; correct its options")
    if array.dtype == np.float32 and not np.abs(array).max(initial=0.0) <= _MAX_VALUE:
        raise ValueError(
            f"the processor made {name} with values beyond {_MAX_VALUE:g}, or that are no numbers; correct "
            "rescale_factor, image_mean and image_std in mm_processor_kwargs"
        )
    return ImageArray.of(name, array)


def _read_frame(file: IO[bytes]) -> bytes | None:
    """Return the next frame; None at the end of the file."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    frame = file.read(length)
    return frame if len(frame) == length else None


def _write_frame(file: IO[bytes], result: ImageResult) -> None:
    """Write an answer. The file is not buffered, so that an answer is not copied once more."""
    frame = msgspec.msgpack.encode(result)
    for part in (HEADER.pack(len(frame)), frame):
        view = memoryview(part)
        while view:
            view = view[file.write(view) :]


if __name__ == "__main__":
    main()
