"""Nobody waits for a compiler: numpy's kernels serve until it has finished."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest

from weightsync.delta import kernels
from weightsync.delta.kernels import plain
from weightsync.jit.choosing import Choice


def test_numpy_serves_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    made = ModuleType("weightsync.delta.kernels.made")

    def compile_slowly() -> ModuleType:
        begun.set()
        go.wait(10)
        return made

    monkeypatch.setattr(kernels, "_choice", Choice(kernels._plain, compile_slowly))
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(kernels.warm_up()))
    thread.start()
    assert begun.wait(10)
    assert kernels.chosen() is plain
    go.set()
    thread.join()
    assert told == ["made"]
    assert kernels.chosen() is made


def test_the_first_who_asks_has_them_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("made")
    monkeypatch.setattr(kernels, "_choice", Choice(kernels._plain, lambda: made))
    assert kernels.chosen() is made
