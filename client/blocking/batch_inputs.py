"""The prompts of a batch, each with its parameters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from vllm_mp.requests.image_options import check_processor_options

Message = Mapping[str, Any]
"""A message of a conversation, with a "role" and a "content"."""


class BatchInput(NamedTuple):
    """A prompt or a conversation, and what belongs to it alone."""

    prompt_index: int
    """Index of its prompt in the batch."""
    prompt: Any
    params: Any
    lora_request: Any
    priority: int


class BatchInputs:
    """The inputs of a batch, taken from an iterable one by one.

    If there are priorities, the inputs come in their order, lowest first, because not all are live at a time.
    """

    def __init__(self, prompts: Iterable[Any], params: Any, lora_request: Any, priority: Any) -> None:
        """Each of `params`, `lora_request` and `priority` is the same for all prompts, or a list with one for each.

        Raises ValueError for a list with another number of entries than there are prompts.
        """
        each = {"params": params, "lora_request": lora_request, "priority": 0 if priority is None else priority}
        self._lists = {name: value for name, value in each.items() if _is_list(value)}
        if self._lists and not _is_list(prompts):
            prompts = list(prompts)
        self._prompts = prompts
        self._same = {name: value for name, value in each.items() if name not in self._lists}
        self.total = len(prompts) if isinstance(prompts, Sized) else None
        """Number of inputs; None if it is not known."""
        for name, values in self._lists.items():
            if len(values) != self.total:
                raise ValueError(f"{name} must have an entry for each of the {self.total} prompts, got {len(values)}")

    def values(self, name: str) -> Sequence[Any]:
        """Return the argument `name`: a value for each prompt, or one value for all prompts."""
        return self._lists[name] if name in self._lists else [self._same[name]]

    def __iter__(self) -> Iterator[BatchInput]:
        if "priority" not in self._lists:
            for index, prompt in enumerate(self._prompts):
                yield self._input(index, prompt)
            return
        prompts, priorities = list(self._prompts), self._lists["priority"]
        for index in sorted(range(len(prompts)), key=priorities.__getitem__):
            yield self._input(index, prompts[index])

    def _input(self, index: int, prompt: Any) -> BatchInput:
        own = {name: values[index] for name, values in self._lists.items()}
        return BatchInput(index, prompt, **self._same, **own)


def prompts_of(prompts: Any) -> Iterable[Any]:
    """Return an iterable of prompts; `prompts` is one, or a single prompt: text, token ids or a dict."""
    if isinstance(prompts, str | bytes | Mapping) or (_is_list(prompts) and len(prompts) and _is_token_id(prompts[0])):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a prompt or an iterable of prompts, got {type(prompts).__name__}")
    return prompts


def with_processor_kwargs(prompts: Iterable[Any], options: dict[str, Any] | None) -> Iterable[Any]:
    """Return `prompts`, with `options` for the image processor in those with images that have none of their own."""
    if not options:
        return prompts
    options = check_processor_options("mm_processor_kwargs", options)

    def completed(prompt: Any) -> Any:
        if isinstance(prompt, dict) and prompt.get("multi_modal_data") and prompt.get("mm_processor_kwargs") is None:
            return {**prompt, "mm_processor_kwargs": options}
        return prompt

    return [completed(prompt) for prompt in prompts] if isinstance(prompts, list) else map(completed, prompts)


def conversations_of(messages: Any) -> Iterable[Sequence[Message]]:
    """Return an iterable of conversations; `messages` is one, or a single conversation: a list of messages."""
    if _is_list(messages) and len(messages) and isinstance(messages[0], Mapping):
        return [messages]
    if not isinstance(messages, Iterable) or isinstance(messages, str | bytes | Mapping):
        raise TypeError(
            f"messages must be a list of messages or an iterable of such lists, got {type(messages).__name__}"
        )
    return messages


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int | np.integer)
