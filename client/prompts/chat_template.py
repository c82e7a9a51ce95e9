"""The chat template: a conversation becomes the text of a prompt, in a thread and within a limit of time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_mp.client.prompts.chat_images import content_form, with_images
from vllm_mp.client.prompts.chat_messages import ChatMessageError, template_messages
from vllm_mp.client.prompts.model_tokenizer import LibraryNeeded, ModelTokenizer, template_arguments
from vllm_mp.client.prompts.template_text import import_jinja
from vllm_mp.client.prompts.tool_prompt import has_tool_turns, knows_tools, with_text_for_tools
from vllm_mp.client.threads.background_call import call_in_thread
from vllm_mp.client.threads.template_interrupt import raise_in_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 2.0
"""Longest time for one rendering."""
_MAX_CHARACTERS = 2**26
"""Longest text that a template may make."""
_NUM_THREADS = 4
_STOP_INTERVAL_S = 0.005
"""Time between two attempts to end a rendering."""

_Result = TypeVar("_Result")


class ChatTemplateError(ValueError):
    """A template cannot be rendered for a conversation; the message says why."""


class _Stopped(BaseException):
    """Raised inside a rendering from another thread, to end it. No template can catch it."""


class ChatTemplate:
    """Renders the chat template of a tokenizer in worker threads, so that the event loop never waits for a template.

    A template is code: it runs in Jinja's sandbox, and a rendering that takes too long is ended in its thread. The
    threads end when the object is dropped.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | ModelTokenizer | None,
        time_limit: float = TIME_LIMIT_S,
        image_token: str | None = None,
    ) -> None:
        """`tokenizer` is None for an engine without one; then nothing can be rendered. `time_limit` is in seconds.

        `image_token` is the text of the model's placeholder of an image; None: it takes none.
        """
        self._image_token = image_token
        self._tokenizer = tokenizer
        self._time_limit = time_limit
        self._reserved: frozenset[str] = frozenset()
        """Names that no variable of a template may have."""
        if tokenizer is not None:
            self._reserved = template_arguments(tokenizer) | {"messages"}
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="vllm-mp-chat-template")
        self._imports = self._executor.submit(import_jinja) if tokenizer is not None else None
        """The import of Jinja: neither on the event loop nor within the limit of a rendering."""
        self._has_told_of_tools = False

    @property
    def source(self) -> str:
        """The template that applies if a request has none of its own; empty if there is none."""
        template = getattr(self._tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("default", "")
        return template or ""

    def source_for(self, has_tools: bool) -> str:
        """Return the template that applies to a request without one of its own; some models have one for tools."""
        template = getattr(self._tokenizer, "chat_template", None)
        if has_tools and isinstance(template, dict) and "tool_use" in template:
            return str(template["tool_use"])
        return self.source

    async def render(
        self,
        messages: Sequence[Any],
        *,
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        tool_fallback: bool = True,
        has_images: bool = False,
    ) -> str:
        """Return the text of `messages` in `template`, by default the tokenizer's own.

        The text holds the special tokens already. `messages` are as `template_messages` takes them; `tools` and
        `variables` are extra variables for the template. With `tool_fallback`, a template that knows no tools gets
        them, and calls and results in `messages`, as text. `has_images`: `take_images` has marked images in the
        messages. Raises ChatMessageError for a message that no template can
        use, and ChatTemplateError, which says why, if the template refuses the messages, fails, or takes too long.
        """
        if self._tokenizer is None:
            raise ChatTemplateError("the engine has no tokenizer; leave skip_tokenizer_init off")
        source = template or self.source_for(has_tools=bool(tools))
        if not source:
            raise ChatTemplateError("the model has no chat template; give the option chat_template")
        if wrong := sorted((variables or {}).keys() & self._reserved):
            raise ChatTemplateError(f"chat_template_kwargs must not hold {wrong[0]!r}; choose another name")
        writes_tools_as_text = tool_fallback and not knows_tools(source)
        if tools and writes_tools_as_text and not self._has_told_of_tools:
            self._has_told_of_tools = True
            logger.warning(
                "the chat template knows no tools: a built-in prompt describes them, and calls are JSON between "
                "<tool_call> and </tool_call>; `vllm-mp serve --no-tool-fallback` refuses tools instead"
            )
        rendering = _Rendering(
            self._apply,
            messages,
            "developer" in source,
            writes_tools_as_text,
            self._content(source, has_images),
            {
                **(variables or {}),
                "tools": tools,
                "tokenize": False,
                "chat_template": template,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
            },
        )
        try:
            text = await self._run(rendering)
        except LibraryNeeded:
            assert isinstance(self._tokenizer, ModelTokenizer)
            await call_in_thread(self._tokenizer.library)  # which no limit may interrupt
            text = await self._run(rendering)
        if len(text) > _MAX_CHARACTERS:
            raise ChatTemplateError(f"the chat template made {len(text)} characters, the limit is {_MAX_CHARACTERS}")
        return text

    def _apply(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        """Return the text of `messages`; raises LibraryNeeded if the tokenizer must load transformers for it."""
        tokenizer: Any = self._tokenizer
        apply = tokenizer.render_chat if isinstance(tokenizer, ModelTokenizer) else tokenizer.apply_chat_template
        text: str = apply(messages, **arguments)
        return text

    async def _run(self, rendering: _Rendering) -> str:
        """Return the text of `rendering`, and end it if this call ends before."""
        if self._imports is not None and not self._imports.done():
            # If it fails, the rendering does too and says why. `wait` does not cancel it, as other renderings need it.
            await asyncio.wait([_future_of(self._imports)])
        future = self._executor.submit(rendering.run)
        try:
            return await self._within_limit(rendering, future)
        finally:
            # Also when the caller is cancelled: its thread must not go on.
            if not future.done() and not future.cancel():
                rendering.stop()

    def _content(self, source: str, has_images: bool) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
        """Return what gives messages the form of content that the template `source` reads."""
        token = self._image_token
        if token is None:
            if has_images:
                raise ChatTemplateError("the model takes no images; leave them out of the messages")
            return lambda messages: messages
        form = content_form(source)
        return lambda messages: with_images(messages, form, token, has_images)

    async def _within_limit(self, rendering: _Rendering, future: Future[str]) -> str:
        """Return the rendered text. The limit counts from the start of the rendering, not the time in the queue."""
        waiting = _future_of(future)
        remaining = self._time_limit
        while remaining > 0:
            await asyncio.wait([waiting], timeout=remaining)
            if waiting.done():
                return waiting.result()
            started = rendering.started
            remaining = self._time_limit if started is None else started + self._time_limit - time.monotonic()
        raise ChatTemplateError(f"the chat template did not end within {self._time_limit:g} s; correct the template")


def _future_of(future: Future[_Result]) -> asyncio.Future[_Result]:
    """Return a future of the running loop for `future`; an error that no caller takes any more is not reported."""
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiting


class _Rendering:
    """A call of `apply_chat_template` that another thread can end."""

    def __init__(
        self,
        apply: Callable[..., str],
        messages: Sequence[Any],
        knows_developer: bool,
        writes_tools_as_text: bool,
        content: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
        arguments: dict[str, Any],
    ) -> None:
        """`knows_developer`: the template has the role "developer". `arguments` are those beside the messages.

        `content` gives messages the form that the template reads. `writes_tools_as_text`: the template gets tools, and
        turns with tools, as the text of messages.
        """
        self.started: float | None = None
        """When the rendering began, in seconds of `time.monotonic()`; None before."""
        self._apply = apply
        self._messages = messages
        self._knows_developer = knows_developer
        self._writes_tools_as_text = writes_tools_as_text
        self._content = content
        self._arguments = arguments
        self._lock = threading.Lock()
        self._thread: int | None = None
        """The thread of the rendering while it can be ended."""
        self._is_stopped = False

    def run(self) -> str:
        """Return the rendered text. Raises ChatTemplateError if the template fails or is stopped.

        Raises ChatMessageError for a message that no template can use, and what `apply` raises beside exceptions; then
        it can run again.
        """
        try:
            with self._lock:
                if self._is_stopped:
                    raise _Stopped
                self._thread, self.started = threading.get_ident(), time.monotonic()
            try:
                messages = template_messages(self._messages, knows_developer=self._knows_developer)
                text = self._text(messages)
            finally:
                with self._lock:
                    self._thread = None
                # An exception that `stop` raised before the lock was taken arrives here at the latest.
                for _ in range(2):
                    pass
            return text
        except _Stopped:
            raise ChatTemplateError("the rendering of the chat template was stopped") from None
        except ChatMessageError:
            raise
        except Exception as error:
            message = str(error) or type(error).__name__
            raise ChatTemplateError(f"the chat template failed: {message:.500}") from error

    def _text(self, messages: list[dict[str, Any]]) -> str:
        """Return the text of `messages` in the template."""
        tools = self._arguments["tools"]
        if not self._writes_tools_as_text or not (tools or has_tool_turns(messages)):
            return self._apply(self._content(messages), **self._arguments)
        arguments = {**self._arguments, "tools": None}
        plain = with_text_for_tools(messages, tools or ())
        try:
            return self._apply(self._content(plain), **arguments)
        except Exception:
            other = with_text_for_tools(messages, tools or (), in_system_message=False)
            if other == plain:
                raise
            return self._apply(self._content(other), **arguments)

    def stop(self) -> None:
        """End the rendering soon, whether it runs already or not; it cannot run again."""
        with self._lock:
            self._is_stopped = True
            is_running = self._thread is not None
        if is_running:
            threading.Thread(target=self._interrupt, name="vllm-mp-stop-rendering", daemon=True).start()

    def _interrupt(self) -> None:
        """End the rendering; return when it has ended."""
        while self._thread is not None:
            time.sleep(_STOP_INTERVAL_S)
            with self._lock:
                if self._thread is not None:
                    raise_in_template(self._thread, _Stopped)
