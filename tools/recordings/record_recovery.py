"""Record a stream that survives a kill of its core, and draw it as docs/recovery.svg.

    python tools/recordings/record_recovery.py
    python tools/recordings/record_recovery.py --prompt "Tell me of a fox." --kill-after 60 --output recovery.svg

The default model tells a story twice with the same seed: first undisturbed, then with SIGKILL to its core after some
tokens. The exit code is 1 if the two texts differ. The drawing replays the second run in real time; every time in it is
measured. A viewer that does not animate SVG shows the whole story.
"""

import argparse
import asyncio
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from vllm_mp import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams
from vllm_mp.cli.chat_text import chat_prompt
from vllm_mp.testing.measuring.recording import (
    COLUMNS,
    HOLD_S,
    LINE_PX,
    MARGIN_PX,
    ROOT,
    WIDTH_PX,
    appearing,
    beginning,
    provenance,
)


class Piece(NamedTuple):
    """Text as a consumer received it."""

    text: str
    time_s: float
    """Since the request was sent."""


class Recording(NamedTuple):
    """A stream whose core was killed; times in seconds since the request was sent."""

    pieces: list[Piece]
    killed_s: float
    killed_pid: int
    next_pid: int

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def resumed_s(self) -> float:
        """When the first token of the next core arrived: after the longest wait that ended after the kill.

        Tokens that were on their way at the kill arrive at once.
        """
        waits = [pair for pair in itertools.pairwise(self.pieces) if pair[1].time_s > self.killed_s]
        return max(waits, key=lambda pair: pair[1].time_s - pair[0].time_s)[1].time_s

    @property
    def pause_s(self) -> float:
        """From the kill to the first token of the next core."""
        return self.resumed_s - self.killed_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="Tell me a short story about a lighthouse keeper and the sea.")
    parser.add_argument("--kill-after", type=int, default=70, help="tokens after which the core is killed (70)")
    parser.add_argument("--tokens", type=int, default=188, help="tokens of the story at most (188)")
    parser.add_argument("--seed", type=int, default=4, help="seed of the story (4)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/recovery.svg", help="where to write the drawing")
    args = parser.parse_args()
    # In float32 a stream that was interrupted has the same text as one that was not.
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(dtype="float32", disable_log_requests=True))
    try:
        prompt = chat_prompt(llm, [{"role": "user", "content": args.prompt}])
        params = SamplingParams(
            temperature=0.7, seed=args.seed, max_tokens=args.tokens, output_kind=RequestOutputKind.DELTA
        )
        undisturbed, recording = asyncio.run(_record(llm, prompt, params, args.kill_after))
    finally:
        llm.shutdown()
    if recording.text != undisturbed:
        print(f"the texts differ:\n{undisturbed}\n---\n{recording.text}", file=sys.stderr)
        return 1
    args.output.write_text(draw(recording, args.prompt, provenance("float32")))
    print(f"{args.output}: the stream paused for {recording.pause_s:.2f} s; the text is the same as undisturbed")
    return 0


async def _record(llm: AsyncLLM, prompt: list[int], params: SamplingParams, kill_after: int) -> tuple[str, Recording]:
    """Return the undisturbed text, and the run in which the core is killed after `kill_after` tokens."""
    undisturbed = "".join([output.outputs[0].text async for output in llm.generate(prompt, params)])
    pieces: list[Piece] = []
    num_tokens, killed_s, killed_pid = 0, 0.0, 0
    started = time.monotonic()
    async for output in llm.generate(prompt, params):
        completion = output.outputs[0]
        num_tokens += len(completion.token_ids)
        pieces.append(Piece(completion.text, time.monotonic() - started))
        if not killed_pid and num_tokens >= kill_after:
            killed_pid = (await llm.core_status())["pid"]
            os.kill(killed_pid, signal.SIGKILL)
            killed_s = time.monotonic() - started
    if pieces[-1].time_s <= killed_s or not killed_pid:
        raise SystemExit(f"the story ended by token {num_tokens}; give a smaller --kill-after or another --seed")
    next_pid = (await llm.core_status())["pid"]
    return undisturbed, Recording(pieces, killed_s, killed_pid, next_pid)


def draw(recording: Recording, prompt: str, source: str) -> str:
    """Return the recording as an animated SVG: the text as it arrived, above a time line with a mark for each token."""
    end_s = recording.pieces[-1].time_s
    total_s = end_s + HOLD_S
    lines = _lines(recording)
    story_y = MARGIN_PX + 2 * LINE_PX
    bar_y = story_y + (len(lines) + 1) * LINE_PX
    height = bar_y + 4 * LINE_PX
    span_px = WIDTH_PX - 2 * MARGIN_PX

    def x(seconds: float) -> float:
        return MARGIN_PX + span_px * seconds / end_s

    def ticks(second_core: bool) -> str:
        times = [piece.time_s for piece in recording.pieces if (piece.time_s >= recording.resumed_s) == second_core]
        return "".join(f"M{x(seconds):.1f} {bar_y}v14" for seconds in times)

    parts = [
        *beginning(
            height,
            f"A stream goes on after kill -9 of its core, {recording.pause_s:.1f} s later",
            f"{source}; drawn by tools/recordings/record_recovery.py",
        ),
        f'<text class="small" x="{MARGIN_PX}" y="{MARGIN_PX + 8}">&gt; {escape(prompt)}</text>',
    ]
    for i, line in enumerate(lines):
        spans = [
            appearing(piece.text, "second" if piece.time_s >= recording.resumed_s else "first", piece.time_s, total_s)
            for piece in line
        ]
        parts.append(f'<text x="{MARGIN_PX}" y="{story_y + i * LINE_PX}">{"".join(spans)}</text>')
    killed, going_on = x(recording.killed_s), x(recording.resumed_s)
    labels = [
        (MARGIN_PX, bar_y + 34, "start", "small", f"core {recording.killed_pid} (one mark per token)"),
        (killed, bar_y - 14, "middle", "kill", f"kill -9 {recording.killed_pid}"),
        ((killed + going_on) / 2, bar_y + 12, "middle", "small", f"{recording.pause_s:.1f} s"),
        (WIDTH_PX - MARGIN_PX, bar_y + 34, "end", "small", f"core {recording.next_pid} continues the same answer"),
        (MARGIN_PX, bar_y + 60, "start", "small", source),
    ]
    parts += [
        f'<rect class="pause" x="{killed:.1f}" y="{bar_y - 6}" width="{going_on - killed:.1f}" height="26"/>',
        f'<path class="bar1" d="{ticks(False)}"/><path class="bar2" d="{ticks(True)}"/>',
        *(
            f'<text class="{kind}" x="{place:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
            for place, y, anchor, kind, text in labels
        ),
        f'<path class="head" d="M{MARGIN_PX} {bar_y - 8}v30" visibility="hidden">'
        f'<set attributeName="visibility" to="visible" begin="0s"/>'
        f'<animateTransform attributeName="transform" type="translate" values="0;{span_px};{span_px}" '
        f'keyTimes="0;{end_s / total_s:.4f};1" dur="{total_s:.2f}s" repeatCount="indefinite"/></path>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lines(recording: Recording) -> list[list[Piece]]:
    """Break the text between words into lines of at most `COLUMNS` characters."""
    words: list[list[Piece]] = []
    for piece in recording.pieces:
        for i, part in enumerate(piece.text.split("\n")):
            if i:
                words.append([piece._replace(text="\n")])
            if part and (not words or part.startswith(" ") or words[-1][0].text == "\n"):
                words.append([piece._replace(text=part)])
            elif part:
                words[-1].append(piece._replace(text=part))
    lines: list[list[Piece]] = [[]]
    column = 0
    for word in words:
        length = sum(len(piece.text) for piece in word)
        if word[0].text == "\n":
            if lines[-1]:
                lines.append([])
            column = 0
            continue
        if column + length > COLUMNS and column:
            lines.append([])
            column = 0
            word = [word[0]._replace(text=word[0].text.lstrip()), *word[1:]]
        lines[-1] += word
        column += length
    return [line for line in lines if line]


if __name__ == "__main__":
    sys.exit(main())
