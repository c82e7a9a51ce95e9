"""Progress bars of tqdm that fit into a line of the terminal."""

from collections.abc import Sequence
from typing import Any

from tqdm import tqdm
from tqdm.utils import disp_len, disp_trim

from vllm_mp.machine.terminal_width import shortened, terminal_columns

_LEAST_BAR = 8
"""Columns of the bar itself. A form with a narrower one is not used."""
_COUNT = "{n_fmt}/{total_fmt}"
COUNT_FORMS = (
    "{desc}: {percentage:3.0f}%|{bar}| " + _COUNT + " [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
    "{desc}: {percentage:3.0f}%|{bar}| " + _COUNT + " [{elapsed}<{remaining}]",
    "{desc}: {percentage:3.0f}% " + _COUNT + " [{elapsed}<{remaining}]",
    "{desc}: {percentage:3.0f}% " + _COUNT,
)
"""What a bar of things that are counted shows, from much to little."""


class FittedBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar that shows the first of several forms for which the terminal has room at that moment.

    tqdm itself cuts a line that is too long, within a number if need be. Here the last form is used if there is room
    for none, with its description shortened.
    """

    def __init__(self, *args: Any, forms: Sequence[str] = COUNT_FORMS, **options: Any) -> None:
        """`forms` are formats as in tqdm's `bar_format`, which comes before them if it is given.

        They may use the keys of `fields` as well, which can be set at any time.
        """
        self.forms = tuple(forms)
        self.fields: dict[str, str] = options.pop("fields", {})
        super().__init__(*args, **options)

    def __str__(self) -> str:
        columns = terminal_columns(self.fp)
        values = self.format_dict | self.fields
        forms = (*([self.bar_format] if self.bar_format else []), *self.forms)
        for form in forms:
            values |= {"bar_format": form.replace("{bar}", ""), "ncols": None}
            room = columns - disp_len(self.format_meter(**values))
            if room >= (_LEAST_BAR if "{bar}" in form else 0):
                return str(self.format_meter(**values | {"bar_format": form, "ncols": columns}))
        values["prefix"] = shortened(self.desc, len(self.desc) + room)
        return str(disp_trim(self.format_meter(**values), columns))
