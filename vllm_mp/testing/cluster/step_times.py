"""How long a step of a core takes: a table of recorded steps, and the model that is fitted to it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

RECORDED = Path(__file__).with_name("step_times.json")
"""Recorded with `tools/simulate_cluster.py --record`, which also writes where and when."""
COLUMNS = ("rows", "context", "read", "pairs", "seconds")
"""Columns of a recorded step: decodes; tokens in the cache of all decodes; prompt tokens; pairs of a prompt token and
a token that it attends to; duration."""


class StepModel(NamedTuple):
    """The seconds of a step as a sum over what it computes."""

    base: float
    """Seconds of any step."""
    row: float
    """Seconds of a decode."""
    context: float
    """Seconds of a token in the cache of a decode."""
    read: float
    """Seconds of a prompt token."""
    pair: float
    """Seconds of a pair of a prompt token and a token that it attends to."""

    def seconds(self, rows: int, context: int, read: int = 0, pairs: float = 0.0) -> float:
        """Return the seconds of a step; the arguments are the columns of `COLUMNS`."""
        return self.base + rows * self.row + context * self.context + read * self.read + pairs * self.pair

    def decode_seconds(self, num_steps: int, rows: int, context: int) -> float:
        """Return the seconds of `num_steps` decodes of the same rows, each of which grows by a token a step."""
        grown = num_steps * context + rows * (num_steps * (num_steps - 1) // 2)
        return num_steps * (self.base + rows * self.row) + grown * self.context

    def num_steps_in(self, seconds: float, rows: int, context: int) -> int:
        """Return how many of the steps of `decode_seconds` end within `seconds`."""
        if seconds <= 0.0:
            return 0
        square = rows * self.context / 2
        linear = self.base + rows * self.row + (context - rows / 2) * self.context
        if square:
            count = int((-linear + (linear * linear + 4 * square * seconds) ** 0.5) / (2 * square))
        else:
            count = int(seconds / linear)
        while self.decode_seconds(count + 1, rows, context) <= seconds:  # the root is rounded
            count += 1
        while count and self.decode_seconds(count, rows, context) > seconds:
            count -= 1
        return count


def load_recorded(path: Path = RECORDED) -> dict[str, Any]:
    """Return a recording: its steps, rows of `COLUMNS`, and where they were recorded."""
    recording: dict[str, Any] = json.loads(path.read_text())
    if recording["columns"] != list(COLUMNS):
        raise ValueError(f"{path}: columns={recording['columns']}, not {list(COLUMNS)}; record the steps again")
    return recording


def fit(steps: npt.ArrayLike) -> StepModel:
    """Return the model that has the smallest squares of relative errors over `steps` [n, 5].

    No coefficient is negative: one that would be is left out (0).
    """
    table = np.asarray(steps, np.float64)
    features = np.concatenate([np.ones((len(table), 1)), table[:, :4]], axis=1) / table[:, 4:]
    kept = np.arange(features.shape[1])
    while True:
        found = np.linalg.lstsq(features[:, kept], np.ones(len(table)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept = np.delete(kept, found.argmin())
    coefficients = np.zeros(features.shape[1])
    coefficients[kept] = found
    return StepModel(*coefficients.tolist())


def errors(model: StepModel, steps: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the relative error of the model for each of `steps` [n, 5]."""
    table = np.asarray(steps, np.float64)
    fitted = model.base + table[:, :4] @ np.array(model[1:])
    found: npt.NDArray[np.float64] = np.abs(fitted / table[:, 4] - 1)
    return found
