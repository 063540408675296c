"""Both copiers copy what they digest, and digest as xxhash does."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.digest import tensor_digest
from weightsync_client import copying
from weightsync_client.copying import STEP, plain
from weightsync_client.copying.compiled import CompiledCopier, make_copier

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync_client.copying import Copier

_TEXT = np.random.default_rng(3).integers(0, 256, 300_000, np.uint8)
_PAINT = 0xA5

_makers = pytest.mark.parametrize("make", [CompiledCopier, plain.make_copier])


def _run(program: str, **variables: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ran.stdout.strip()


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
    copier = make_copier(size)
    copier.update(memoryview(source), memoryview(target))
    assert copier.digest() == tensor_digest(source)
    assert bytes(target) == source


@pytest.mark.parametrize(
    ("size", "piece", "target"),
    [(2000, 1000, 1000), (2000, 2001, 2001), (2048, 1024, 1023), (2000, 2000, 2001), (2000, 0, 0)],
    ids=["within a block", "beyond the end", "less room", "more room", "nothing"],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    size: int, piece: int, target: int
) -> None:
    room = bytearray(target)
    with pytest.raises(ValueError, match="bytes"):
        CompiledCopier(size).update(memoryview(b"x" * piece), memoryview(room))
    assert not any(room)


def test_a_short_text_is_refused_and_nothing_comes_after_the_end() -> None:
    with pytest.raises(ValueError, match="240 bytes"):
        CompiledCopier(240)
    room = bytearray(2048)
    copier = CompiledCopier(2048)
    copier.update(memoryview(bytes(2048)), memoryview(room))
    for size in (0, 1024):
        with pytest.raises(ValueError, match="0 of 2048 left"):
            copier.update(memoryview(bytes(size)), memoryview(room)[:size])
    assert copier.digest() == tensor_digest(bytes(2048))


def test_nothing_is_touched_outside() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.client.copying.guarded"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 400


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the name of an instruction of x86")
def test_blocks_go_past_the_caches() -> None:
    program = """
from weightsync_client.copying import compiled
(machine_code,) = compiled._copy_blocks.inspect_asm().values()
print("movnt" in machine_code)
"""
    # Code that was kept cannot be looked at.
    assert _run(program, NUMBA_CACHE_DIR="/proc/nowhere") == "True"


def test_until_it_is_ready_and_without_numba_numpy_copies() -> None:
    program = """
import sys
{}
from weightsync_client import copying
before = type(copying.copier_of(1 << 20)).__name__, "numba" in sys.modules
print(*before, copying.warm_up(), type(copying.copier_of(1 << 20)).__name__)
"""
    assert _run(program.format("")) == "PlainCopier False compiled CompiledCopier"
    absent = program.format('sys.modules["numba"] = None')
    assert _run(absent) == "PlainCopier True plain PlainCopier"
    assert _run(program.format(""), NUMBA_DISABLE_JIT="1") == "PlainCopier False plain PlainCopier"


def test_warming_up_again_changes_nothing() -> None:
    assert copying.warm_up() == copying.warm_up() == "compiled"
    assert isinstance(copying.copier_of(1 << 20), CompiledCopier)
