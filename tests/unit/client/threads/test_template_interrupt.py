"""A template is ended in its thread; what holds locks, such as an import, is not interrupted."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_mp.client.prompts.template_text import template_text
from vllm_mp.client.threads.template_interrupt import raise_in_template


class _Ended(BaseException):
    pass


def _render(template: str, **variables: Any) -> None:
    template_text(template, [{}], None, variables, add_generation_prompt=False, continue_final_message=False)


def _attempts(call: Callable[[Callable[[], None], Callable[[], bool]], None], num_attempts: int) -> tuple[bool, bool]:
    """Return whether one of some attempts to interrupt `call` was made, and whether it ended the call.

    `call` gets a function that it calls when it runs, and another that tells it when to end.
    """
    has_begun, is_over, was_ended = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        try:
            call(has_begun.set, is_over.is_set)
        except _Ended:
            was_ended.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert has_begun.wait(60)
    assert thread.ident is not None
    was_raised = False
    for _ in range(num_attempts):
        was_raised |= raise_in_template(thread.ident, _Ended)
        thread.join(0.001)
        if not thread.is_alive():
            break
    if not was_raised:
        is_over.set()
    thread.join(60)
    return was_raised, was_ended.is_set()


@pytest.mark.parametrize(
    "loop", ["{% for j in range(100000) %}{% endfor %}", "{{ range(100000) | map('string') | list }}"]
)
def test_template_that_runs_is_ended(loop: str) -> None:
    template = "{{ begin() }}{% for i in range(100000) %}" + loop + "{% endfor %}"
    assert _attempts(lambda begin, _: _render(template, begin=begin), 10_000) == (True, True)


def test_function_that_a_template_calls_is_not_interrupted() -> None:
    def call(begin: Callable[[], None], is_over: Callable[[], bool]) -> None:
        def wait() -> None:
            begin()
            while not is_over():
                pass

        _render("{{ wait() }}", wait=wait)

    assert _attempts(call, 50) == (False, False)


def test_import_is_not_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "renders_while_imported.py").write_text("import sys\nsys.modules['hooks_of_test'].render()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(begin: Callable[[], None], is_over: Callable[[], bool]) -> None:
        class Hooks:
            @staticmethod
            def render() -> None:
                begin()
                while not is_over():
                    _render("{% for i in range(1000) %}{% endfor %}")

        monkeypatch.setitem(sys.modules, "hooks_of_test", Hooks)
        importlib.import_module("renders_while_imported")

    assert _attempts(call, 50) == (False, False)


def test_thread_that_has_ended_is_not_interrupted() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert not raise_in_template(thread.ident, _Ended)
