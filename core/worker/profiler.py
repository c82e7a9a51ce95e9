"""Traces of a core's steps by PyTorch's profiler."""

import logging
import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from vllm_mp.machine.deferred_modules import load_deferred_modules

logger = logging.getLogger(__name__)

MAX_STEPS = 256
"""Maximum number of steps in one trace, which stays in memory until it is written."""


class Profiler:
    """Records the work of host and device in each step, and writes traces for Chrome and Perfetto.

    All traces of a core go to the folder VLLM_TORCH_PROFILER_DIR, or to a new temporary folder.
    """

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None
        self._steps_left = 0
        self._folder: Path | None = None
        self._num_written = 0

    def start(self) -> None:
        """Record the next steps, at most `MAX_STEPS`; raise ValueError if the profiler is on already."""
        if self._profile is not None:
            raise ValueError("the profiler is on already; call stop_profile first")
        load_deferred_modules()  # those that are executed amid the imports of PyTorch's profiler fail
        recording = profile(activities=self._activities)
        recording.start()
        self._profile = recording
        self._steps_left = MAX_STEPS

    def count_step(self) -> None:
        """Count a step, and stop recording after `MAX_STEPS`. Must be called after each step."""
        if self._profile is None or not self._steps_left:
            return
        self._steps_left -= 1
        if not self._steps_left:
            self._profile.stop()
            logger.warning("the profiler has recorded %d steps, the limit; stop_profile writes them", MAX_STEPS)

    def stop(self, folder: str | None = None) -> str:
        """Stop recording, write the trace, by default to the folder of all traces, and return its folder.

        Raises ValueError if the profiler is not on, or if the trace cannot be written, which is then lost.
        """
        if self._profile is None:
            raise ValueError("the profiler is not on; call start_profile first")
        recorded = self._profile
        self._end()
        try:
            self._folder = Path(folder) if folder is not None else self._folder or _make_folder()
            self._write(recorded, self._folder / f"core-{os.getpid()}-{self._num_written}.trace.json.gz")
        except OSError as error:
            raise ValueError(
                f"the trace cannot be written: {error}; set VLLM_TORCH_PROFILER_DIR to a writable folder"
            ) from error
        self._num_written += 1
        return str(self._folder)

    @staticmethod
    def _write(recorded: "torch.profiler.profile", path: Path) -> None:
        """Write the trace to `path`, in place of whatever has this name: in a folder of all users it may be a trap."""
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as unfinished:
            recorded.export_chrome_trace(str(Path(unfinished) / path.name))
            os.replace(Path(unfinished) / path.name, path)

    def discard(self) -> None:
        """Stop recording without writing a trace; no-op if the profiler is not on."""
        self._end()

    def _end(self) -> None:
        recorded, self._profile = self._profile, None
        steps_left, self._steps_left = self._steps_left, 0
        if recorded is not None and steps_left:
            recorded.stop()


def _make_folder() -> Path:
    """Create and return the folder for traces."""
    wanted = os.environ.get("VLLM_TORCH_PROFILER_DIR")
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="vllm_mp-profile-"))
    folder = Path(os.path.expanduser(wanted)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
