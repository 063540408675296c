"""Compiled kernels make numpy's streams, read what numpy reads, and stay inside their memory."""

from __future__ import annotations

import os
import platform
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.unit.delta.cases import changed_item, encode, items
from weightsync.delta import Item, kernels
from weightsync.delta.coding import Coding, Positions, Values
from weightsync.delta.kernels import plain
from weightsync.jit import processor
from weightsync.layout import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]

# The first test of a process may compile all kernels.
pytestmark = pytest.mark.timeout(300)

pytest.importorskip("numba", reason="compiled kernels need numba")


@pytest.fixture(scope="module", params=["compiled"], autouse=True)
def used_kernels() -> Iterator[None]:
    """This file compares the two itself."""
    before = kernels._choice._made
    kernels._choice._made = None
    yield
    kernels._choice._made = before


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | environment,
    )


def _codings(width: int) -> list[Coding]:
    positions = [where for where in Positions if where is not Positions.NONE]
    values = (Values.ABS, Values.SM) if width == 2 else (Values.ABS,)
    return [Coding(where, what) for where in positions for what in values]


def _check_same(item: Item) -> None:
    from weightsync.delta.kernels import compiled

    width = max(DTYPE_BITS[item.dtype], 8) // 8
    for coding in _codings(width):
        theirs = plain.encode(item.base, item.new, width, coding)
        ours = compiled.encode(item.base, item.new, width, coding)
        assert ours.counts == theirs.counts
        for mine, other in zip(
            (*ours.positions, *ours.values), (*theirs.positions, *theirs.values), strict=True
        ):
            assert mine.tobytes() == other.tobytes(), coding


@settings(max_examples=200, deadline=None)
@given(items(3000))
def test_both_make_the_same_streams(item: Item) -> None:
    _check_same(item)


@pytest.mark.parametrize("density", [0.00001, 0.001, 0.01, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("elements", [1 << 20, (1 << 21) + 77])
def test_both_make_the_same_streams_of_many_pieces(density: float, elements: int) -> None:
    for dtype in ("BF16", "U8"):
        _check_same(changed_item("w", dtype, (elements,), density))


def test_an_odd_address_is_an_address() -> None:
    item = changed_item("w", "BF16", (70_000,), 0.05)
    odd = [np.zeros(len(item.base) + 1, np.uint8)[1:] for _ in range(2)]
    odd[0][:], odd[1][:] = item.base, item.new
    _check_same(item._replace(base=odd[0], new=odd[1]))
    assert encode([item._replace(base=odd[0], new=odd[1])]).blob.tobytes() == (
        encode([item]).blob.tobytes()
    )


def test_bytes_that_may_not_be_written_are_read() -> None:
    item = changed_item("w", "BF16", (70_000,), 0.05)
    for data in (item.base, item.new):
        data.flags.writeable = False
    assert encode([item]).stats[0].nnz > 3000


def test_threads_do_not_meet_in_their_memory() -> None:
    made = [changed_item(f"{at}", "BF16", (300_000,), 0.01 * at, seed=at) for at in range(1, 9)]
    alone = [encode([item]).blob.tobytes() for item in made]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            together = pool.map(lambda item: encode([item]).blob.tobytes(), made)
            assert list(together) == alone


@pytest.mark.parametrize("kind", [processor.PACKS, processor.PLAIN, processor.SHUFFLES])
def test_kernels_stay_inside_their_memory(kind: str) -> None:
    if kind == processor.SHUFFLES and platform.machine() != "x86_64":
        pytest.skip("shuffles are for x86")
    ran = _run("-m", "tests.unit.delta.guarded", kind)
    assert ran.returncode == 0, ran.stderr[-3000:]
    encoded, patched, *legal = map(int, ran.stdout.split())
    assert encoded > 1000
    assert patched >= 100
    # Hostile streams that are legal by chance show that refusing all of them would be noticed.
    assert min(legal) > 0, legal


@pytest.mark.parametrize("at_end", [True, False])
def test_the_guards_bite(at_end: bool) -> None:
    program = f"""
from tests.support.guard_pages import guarded
from weightsync.delta.kernels import compiled
from weightsync.delta.kernels import decoding
array = guarded(8, at_end={at_end})
outside = compiled._address(array) + (8 if {at_end} else -1)
decoding.read_gaps(outside, 0, 1, 1, outside, 4, 1)
"""
    assert _run("-c", program).returncode == -11


def test_importing_compiles_nothing_and_warming_up_does(tmp_path: Path) -> None:
    program = """
import sys, weightsync.delta as delta
print("numba" in sys.modules, delta.warm_up(), "numba" in sys.modules)
"""
    ran = _run("-c", program, XDG_CACHE_HOME=str(tmp_path), NUMBA_CACHE_DIR="")
    assert ran.stdout.split() == ["False", "compiled", "True"], ran.stderr
    (folder,) = (tmp_path / "weightsync-kernels").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    code = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb*")}
    assert any(path.suffix == ".nbc" for path in code)
    _run("-c", program, XDG_CACHE_HOME=str(tmp_path), NUMBA_CACHE_DIR="")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb*")} == code


def test_without_numba_numpy_does_it() -> None:
    program = """
import sys
sys.modules["numba"] = None
from tests.unit.delta.cases import changed_item, encode
from weightsync.delta import warm_up
print(warm_up(), encode([changed_item("w", "BF16", (1000,), 0.1)]).stats[0].coding)
"""
    ran = _run("-c", program)
    assert ran.stdout.split() == ["plain", "gap8+sm"], ran.stderr
    switched_off = _run(
        "-c", program.replace('sys.modules["numba"] = None', ""), NUMBA_DISABLE_JIT="1"
    )
    assert switched_off.stdout == ran.stdout, switched_off.stderr


def test_kernels_work_where_no_code_can_be_kept() -> None:
    program = "from weightsync.delta import warm_up; print(warm_up())"
    ran = _run("-c", program, XDG_CACHE_HOME="/proc/nowhere", NUMBA_CACHE_DIR="")
    assert ran.stdout.split() == ["compiled"], ran.stderr


def test_both_modules_have_the_same_interface() -> None:
    from weightsync.delta.kernels import compiled

    assert plain.__all__ == compiled.__all__
    for name in plain.__all__:
        ours: Any = getattr(compiled, name)
        theirs: Any = getattr(plain, name)
        assert ours.__annotations__ == theirs.__annotations__
