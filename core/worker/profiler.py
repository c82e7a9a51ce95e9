"""PyTorch's profiler over some of a core's steps."""

import logging
import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)

MAX_STEPS = 256
"""The most that one trace holds, as what is noted stays in memory until it is written."""


class Profiler:
    """Notes what host and device do in each step, and writes it as a trace that Chrome and Perfetto show.

    All traces of a core are in the folder that VLLM_TORCH_PROFILER_DIR names, or in a new one for temporary files.
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
        """Note all steps from now on, at most `MAX_STEPS`; raises ValueError when that has begun already."""
        if self._profile is not None:
            raise ValueError("the profiler is on already; call stop_profile first")
        self._profile = profile(activities=self._activities)
        self._profile.start()
        self._steps_left = MAX_STEPS

    def count_step(self) -> None:
        """To be called after each step."""
        if self._profile is None or not self._steps_left:
            return
        self._steps_left -= 1
        if not self._steps_left:
            self._profile.stop()
            logger.warning("the profiler has noted %d steps, which is the most; stop_profile writes them", MAX_STEPS)

    def stop(self) -> str:
        """Write what was noted; the folder that it is in.

        Raises ValueError when `start` has not been called, and when the folder cannot be written to.
        """
        if self._profile is None:
            raise ValueError("the profiler is not on; call start_profile first")
        noted, self._profile = self._profile, None
        if self._steps_left:
            noted.stop()
            self._steps_left = 0
        try:
            self._folder = self._folder or _make_folder()
            noted.export_chrome_trace(str(self._folder / f"core-{os.getpid()}-{self._num_written}.trace.json.gz"))
        except OSError as error:
            raise ValueError(
                f"the trace cannot be written: {error}; set VLLM_TORCH_PROFILER_DIR to a folder that the core can write"
            ) from error
        self._num_written += 1
        return str(self._folder)


def _make_folder() -> Path:
    wanted = os.environ.get("VLLM_TORCH_PROFILER_DIR")
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="vllm_mp-profile-"))
    folder = Path(wanted).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
