"""Measure what images cost a model of the size of SmolVLM-256M with random weights.

Second question: the time to the first token of a second question about an image, divided by that of the first.
Encoding: the time in which the core makes the embeddings of an image, divided by that of transformers' module, which
gets all tiles at once. Figures are medians over rounds, each with its own image.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from PIL import Image

from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm_mp.core.images.encoder import ImageEncoder
from vllm_mp.model_store import DEFAULT_MODEL, resolve_model
from vllm_mp.requests.images import ImageArray, ProcessedImage

QUESTION_GOAL: Final = 0.1
ENCODING_GOAL: Final = 1.0
IMAGE_TOKEN: Final = "<image>"
VISION: Final = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TEXT: Final = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
}
PATCH_SIZE: Final = 16
TOKENS_PER_TILE: Final = 64


def write_model(folder: Path, tile_size: int, layers: dict[str, int]) -> None:
    """Write the configuration, the tokenizer and the settings of the processor of a model; its weights are random.

    `layers` changes the number of layers of both parts.
    """
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(resolve_model(DEFAULT_MODEL))
    marks = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [IMAGE_TOKEN, "<fake_token_around_image>", "<global-img>", *marks]}
    )
    tokenizer.save_pretrained(folder)
    scale = tile_size // PATCH_SIZE // 8
    config = transformers.SmolVLMConfig(
        text_config=TEXT | {"vocab_size": len(tokenizer)} | layers,
        vision_config=VISION | {"image_size": tile_size, "patch_size": PATCH_SIZE} | layers,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        scale_factor=scale,
        architectures=["SmolVLMForConditionalGeneration"],
    )
    config.save_pretrained(folder)
    sizes = {"size": {"longest_edge": 4 * tile_size}, "max_image_size": {"longest_edge": tile_size}}
    settings = {"image_processor_type": "SmolVLMImageProcessor", **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": TOKENS_PER_TILE}))


def photo(size: int, seed: int) -> Image.Image:
    """Return a random image with sides of 3/4 `size` and `size`, smooth as photos are."""
    small = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), np.uint8)
    return Image.fromarray(small).resize((size, size * 3 // 4), Image.Resampling.BICUBIC)


async def question_times(folder: Path, args: argparse.Namespace, size: int) -> tuple[list[float], list[float]]:
    """Return the seconds to the first token of the first and the second question about each image."""
    engine_args = AsyncEngineArgs(model=str(folder), load_format="dummy", dtype=args.dtype, max_model_len=4096)
    async with await AsyncLLM.start(engine_args) as engine:

        async def seconds(image: Image.Image, question: str) -> float:
            prompt = {"prompt": f"User:{IMAGE_TOKEN}{question}", "multi_modal_data": {"image": image}}
            begun = time.perf_counter()
            async for _ in engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True)):
                pass
            return time.perf_counter() - begun

        await seconds(photo(size, 0), "Warm up")
        times = []
        for seed in range(1, args.rounds + 1):
            image = photo(size, seed)
            times.append((await seconds(image, "What is it?"), await seconds(image, "Which colours does it have?")))
    first, second = zip(*times, strict=True)
    return list(first), list(second)


def encoding_times(folder: Path, args: argparse.Namespace, size: int) -> tuple[list[float], list[float]]:
    """Return the seconds of transformers' module and of the core for each image, in turns."""
    config = AsyncEngineArgs(model=str(folder), load_format="dummy").create_engine_config().model_config
    dtype = getattr(torch, args.dtype) if args.dtype != "auto" else torch.float32
    encoder = ImageEncoder(config, dtype, torch.device("cpu"))
    module: Any = encoder.module
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    processor = transformers.SmolVLMImageProcessorPil(**settings)
    theirs, ours = [], []
    for seed in range(args.rounds + 1):
        made = processor([photo(size, seed)], return_tensors="np")
        arrays = [ImageArray.of(name, made[name]) for name in ("pixel_values", "pixel_attention_mask")]
        image = ProcessedImage(b"", arrays)
        num_tiles = encoder.shape_of(image).num_tiles
        pixels = torch.from_numpy(made["pixel_values"]).to(dtype)
        mask = torch.from_numpy(made["pixel_attention_mask"]).bool()

        @torch.inference_mode()
        def of_transformers(pixels: torch.Tensor = pixels, mask: torch.Tensor = mask) -> None:
            module.get_image_features(pixel_values=pixels, pixel_attention_mask=mask)

        def of_core(image: ProcessedImage = image, num_tiles: int = num_tiles) -> None:
            encoder.encode(image, 0, num_tiles)

        theirs.append(_seconds(of_transformers))
        ours.append(_seconds(of_core))
    return theirs[1:], ours[1:]  # without the first, which is slower


def _seconds(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def record(name: str, base: list[float], measured: list[float], goal: float) -> dict[str, Any]:
    """Return the medians of two lists of seconds, and the median of their ratios."""
    ratio = statistics.median(b / a for a, b in zip(base, measured, strict=True))
    return {
        "name": name,
        "base_s": statistics.median(base),
        "measured_s": statistics.median(measured),
        "ratio": ratio,
        "goal": goal,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="use a small model and one round, to test the tool")
    parser.add_argument("--rounds", type=int, default=5, help="number of images (default: 5)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="dtype of the model")
    args = parser.parse_args()
    tile_size, layers = (128, {"num_hidden_layers": 2}) if args.quick else (512, {})
    args.rounds = 1 if args.quick else args.rounds
    size = 2 * tile_size
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, tile_size, layers)
        records = [
            record("second question", *asyncio.run(question_times(folder, args, size)), QUESTION_GOAL),
            record("encoding", *encoding_times(folder, args, size), ENCODING_GOAL),
        ]
    if args.json:
        print(json.dumps(records, indent=1))
        return 0
    print(f"{'':<20}{'base s':>9}{'measured s':>12}{'ratio':>8}{'goal':>8}")
    for each in records:
        missed = "" if each["ratio"] < each["goal"] else "  missed"
        print(
            f"{each['name']:<20}{each['base_s']:>9.3f}{each['measured_s']:>12.3f}{each['ratio']:>8.3f}"
            f"{'<' + str(each['goal']):>8}{missed}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
