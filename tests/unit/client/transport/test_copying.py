"""Both copiers copy what they digest, and digest as xxhash does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.delta import kernels
from weightsync.delta.kernels import native
from weightsync.model.digest import tensor_digest
from weightsync_client.transport.copying import STEP, NativeCopier, PlainCopier, copier_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from _pytest.mark import ParameterSet

Copier = NativeCopier | PlainCopier

_TEXT = np.random.default_rng(3).integers(0, 256, 300_000, np.uint8)
_PAINT = 0xA5

_LEVELS = ("avx2", "avx512")


def _at(level: str, given: object) -> ParameterSet:
    """Return a parameter of a test that needs a level."""
    reason = f"this machine has no {level} kernels"
    lacks = pytest.mark.skipif(level not in kernels.available(), reason=reason)
    return pytest.param(given, marks=lacks, id=level)


_levels = pytest.mark.parametrize("level", [_at(level, level) for level in _LEVELS])
_makers = pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda _: PlainCopier(), id="plain"),
        *(_at(level, partial(NativeCopier, level=level)) for level in _LEVELS),
    ],
)


def _run(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments, program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@_makers
@given(data=st.data())
def test_a_copy_is_the_text_and_its_digest_xxhashs(
    make: Callable[[int], Copier], data: st.DataObject
) -> None:
    size = data.draw(st.integers(241, len(_TEXT) - 64))
    start, place = data.draw(st.integers(0, 63)), data.draw(st.integers(0, 130))
    cuts = data.draw(st.lists(st.integers(0, size // STEP), max_size=4))
    ends = sorted({*(STEP * cut for cut in cuts), size} - {0})
    text = _TEXT.data[start : start + size]
    room = np.full(place + size + 200, _PAINT, np.uint8)
    target = room.data[place : place + size]
    copier, begin = make(size), 0
    for end in ends:
        copier.update(text[begin:end], target[begin:end])
        begin = end
    assert copier.digest() == tensor_digest(text)
    assert target == text
    # And nothing beside it.
    assert {*room[:place].tolist(), *room[place + size :].tolist()} == {_PAINT}


@pytest.mark.parametrize("size", [0, 1, 240, 241, (384 << 10) - 1, 384 << 10, 1 << 20])
def test_texts_of_any_size_have_a_copier(size: int) -> None:
    source, target = bytes(size), bytearray(b"x" * size)
    copier = copier_of(size)
    copier.update(memoryview(source), memoryview(target))
    assert copier.digest() == tensor_digest(source)
    assert bytes(target) == source


@pytest.mark.parametrize(
    ("size", "piece", "target"),
    [(2000, 1000, 1000), (2000, 2001, 2001), (2048, 1024, 1023), (2000, 2000, 2001), (2000, 0, 0)],
    ids=["within a block", "beyond the end", "less room", "more room", "nothing"],
)
@_levels
def test_what_cannot_be_is_refused_before_anything_is_written(
    level: str, size: int, piece: int, target: int
) -> None:
    room = bytearray(target)
    with pytest.raises(ValueError, match="bytes"):
        NativeCopier(size, level).update(memoryview(b"x" * piece), memoryview(room))
    assert not any(room)


@_levels
def test_a_short_text_is_refused_and_nothing_comes_after_the_end(level: str) -> None:
    with pytest.raises(ValueError, match="240 bytes"):
        NativeCopier(240, level)
    room = bytearray(2048)
    copier = NativeCopier(2048, level)
    copier.update(memoryview(bytes(2048)), memoryview(room))
    for size in (0, 1024):
        with pytest.raises(ValueError, match="0 of 2048 left"):
            copier.update(memoryview(bytes(size)), memoryview(room)[:size])
    assert copier.digest() == tensor_digest(bytes(2048))


@_levels
def test_nothing_is_touched_outside(level: str) -> None:
    ran = _run(level, "-m", "tests.unit.client.transport.guarded")
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 400


@_levels
def test_blocks_go_past_the_caches(level: str) -> None:
    if shutil.which("objdump") is None:
        pytest.skip("no objdump, which comes with a compiler")
    ran = subprocess.run(
        ["objdump", "-d", f"--disassemble=copy_piece_{level}", native.LIBRARY],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "vmovntdq" in ran.stdout


def test_the_copier_is_that_of_the_kernels() -> None:
    program = """
import sys
from weightsync_client.transport import messages, shm_writer
before = "numpy" in sys.modules
from weightsync_client.transport import copying
print(before, *(type(copying.copier_of(size)).__name__ for size in (1 << 10, 1 << 20)))
"""
    for name in kernels.available():
        ran = _run(program, "-c", **{kernels.VARIABLE: name})
        large = "NativeCopier" if name in _LEVELS else "PlainCopier"
        assert ran.stdout.split() == ["False", "PlainCopier", large], ran.stderr
