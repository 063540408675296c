"""Which kernels are used: the best that there are, or those that a variable names."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from tests.unit.delta.cases import changed_item, encode
from weightsync.delta import kernels, warm_up
from weightsync.delta.kernels import native, plain
from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", params=["all"], autouse=True)
def used_kernels() -> None:
    """The tests below choose themselves."""


def _forget() -> None:
    for known in (kernels.available, kernels.load_kernels, kernels.chosen, native._library):
        known.cache_clear()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    _forget()
    yield
    _forget()


def test_the_best_are_used() -> None:
    names = kernels.available()
    assert names[0] == "plain"
    if len(names) == 1:
        pytest.skip("no library")
    assert names == ("plain", "generic", "avx2", "avx512")[: len(names)]
    assert kernels.chosen() is kernels.load_kernels(names[-1])
    assert warm_up() == "compiled"


def test_a_variable_names_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in kernels.available():
        monkeypatch.setenv(kernels.VARIABLE, name)
        kernels.chosen.cache_clear()
        assert kernels.chosen() is kernels.load_kernels(name)
        assert getattr(kernels.chosen(), "level", "plain") == name
        assert warm_up() == ("plain" if name == "plain" else "compiled")


def test_a_name_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "avx1024")
    with pytest.raises(WeightSyncError, match="'avx1024', but this machine has plain") as caught:
        kernels.chosen()
    assert caught.value.reason is Reason.REQUEST_INVALID


@pytest.mark.parametrize("content", [None, b"", b"no library"])
def test_without_a_library_numpy_does_it_and_says_so_once(
    content: bytes | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    library = tmp_path / "kernels.so"
    if content is not None:
        library.write_bytes(content)
    monkeypatch.setattr(native, "LIBRARY", library)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert encode([changed_item("w", "BF16", (1000,), 0.1)]).stats[0].coding == "gap8+sm"
            assert kernels.chosen() is plain
            assert warm_up() == "plain"
    (line,) = caplog.messages
    assert "install" in line
    assert str(library) in line


def test_a_library_without_a_function_that_is_called_is_noticed() -> None:
    with pytest.raises(AttributeError):
        native.function("encode_piece", "avx1024")
