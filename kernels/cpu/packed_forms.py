"""The packed forms of a model's matrices: noted while the model is packed, or taken over from an earlier packing."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn


class PackedForm(NamedTuple):
    """What a `PackedLinear` keeps of its weights."""

    weight: Tensor
    """[columns * inputs] in the order in which the kernels read them."""
    scales: Tensor | None
    """float32 [columns], with 8-bit weights; else None."""
    sums: Tensor | None
    """int32 [columns], with 8-bit weights; else None."""


class PackedFormError(Exception):
    """The forms that are taken over are not those that the model needs."""


class _Place(NamedTuple):
    start: int
    size: int
    name: str
    parameter: "weakref.ref[nn.Parameter]"


class FormRecorder:
    """The forms of one packing, in their order, and which parameters of the model they replace."""

    def __init__(self, model: nn.Module) -> None:
        self.forms: list[PackedForm] = []
        self._places = [
            _Place(each.data_ptr(), each.nbytes, name, weakref.ref(each)) for name, each in model.named_parameters()
        ]
        self._left = {place.name: place.size for place in self._places}
        """The bytes of each parameter that no form has replaced."""

    def has_all_of(self, name: str) -> bool:
        """Return whether the forms hold all elements of the parameter `name`."""
        return self._left[name] == 0

    def note(self, weight: Tensor, form: PackedForm) -> None:
        """Note that `form` holds the elements of `weight`, which may be a part of a parameter."""
        self.forms.append(form)
        for start, size, name, parameter in self._places:
            # The memory of a parameter that is gone may hold something else.
            if start <= weight.data_ptr() < start + size and parameter() is not None:
                self._left[name] -= weight.nbytes


_recorder: ContextVar[FormRecorder | None] = ContextVar("recorder", default=None)
_reused: ContextVar[Iterator[PackedForm] | None] = ContextVar("reused", default=None)


@contextlib.contextmanager
def record_forms(model: nn.Module) -> Iterator[FormRecorder]:
    """Record the forms of the matrices of `model` that this thread packs in the block."""
    recorder = FormRecorder(model)
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)


@contextlib.contextmanager
def reuse_forms(forms: Iterable[PackedForm]) -> Iterator[None]:
    """Let each matrix that this thread packs in the block take the next of `forms`, and not read its own elements.

    Raises PackedFormError if a form does not fit its matrix, or if there are fewer or more forms than matrices.
    """
    left = iter(forms)
    token = _reused.set(left)
    try:
        yield
    finally:
        _reused.reset(token)
    if next(left, None) is not None:
        raise PackedFormError("there are more forms than matrices")


def next_form(size: int, dtype: torch.dtype, num_scales: int) -> PackedForm | None:
    """Return the form that the next matrix takes over; None if it is to be packed.

    It has `size` elements of `dtype` and `num_scales` scales and sums, 0 for none. Raises PackedFormError if the form
    is another.
    """
    forms = _reused.get()
    if forms is None:
        return None
    form = next(forms, None)
    if form is None:
        raise PackedFormError("there are fewer forms than matrices")
    counts = [0 if each is None else len(each) for each in (form.scales, form.sums)]
    if (form.weight.dtype, len(form.weight), counts) != (dtype, size, [num_scales] * 2):
        raise PackedFormError(f"a form has {len(form.weight)} elements of {form.weight.dtype}, not {size} of {dtype}")
    return form


def note_form(weight: Tensor, form: PackedForm) -> None:
    """Tell the recorder, if there is one, that `form` holds the elements of `weight`."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.note(weight, form)
