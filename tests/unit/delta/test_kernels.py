"""Kernels in C make NumPy's streams, read what NumPy reads, and stay inside their memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings

from tests.unit.delta.cases import changed_item, encode, items
from weightsync.delta import Item, kernels
from weightsync.delta.coding import Coding, Positions, Values
from weightsync.delta.kernels import native, plain
from weightsync.model.dtypes import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "weightsync/delta/kernels"


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
    width = max(DTYPE_BITS[item.dtype], 8) // 8
    for coding in _codings(width):
        theirs = plain.encode(item.base, item.new, width, coding)
        ours = kernels.chosen().encode(item.base, item.new, width, coding)
        assert ours.counts == theirs.counts
        for mine, other in zip(
            (*ours.positions, *ours.values), (*theirs.positions, *theirs.values), strict=True
        ):
            assert mine.tobytes() == other.tobytes(), coding


@settings(max_examples=200)
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


@pytest.mark.timeout(300)
def test_kernels_stay_inside_their_memory(used_kernels: str) -> None:
    if used_kernels == "plain":
        pytest.skip("NumPy looks after itself")
    ran = _run("-m", "tests.unit.delta.guarded", used_kernels)
    assert ran.returncode == 0, ran.stderr[-3000:]
    encoded, patched, *legal = map(int, ran.stdout.split())
    assert encoded > 1000
    assert patched >= 100
    # Hostile streams that are legal by chance show that refusing all of them would be noticed.
    assert min(legal) > 0, legal


@pytest.mark.parametrize("at_end", [True, False])
def test_the_guards_bite(at_end: bool, used_kernels: str) -> None:
    if used_kernels == "plain":
        pytest.skip("NumPy looks after itself")
    program = f"""
from tests.support.guard_pages import guarded
from weightsync.delta.kernels import native
array = guarded(8, at_end={at_end})
outside = native.address(array) + (8 if {at_end} else -1)
native.function("read_gaps", "{used_kernels}")(outside, 0, 1, 1, outside, 4, 1)
"""
    assert _run("-c", program).returncode == -11


def test_the_library_is_there_where_a_compiler_is_and_is_that_of_the_sources() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    sources = [path for ending in ("*.c", "*.h") for path in SOURCES.glob(ending)]
    assert native.LIBRARY.exists(), "run python scripts/build_kernels.py"
    newest = max(path.stat().st_mtime for path in sources)
    assert native.LIBRARY.stat().st_mtime >= newest, "run python scripts/build_kernels.py"


def test_all_kernels_have_the_same_interface() -> None:
    for name in plain.__all__:
        ours: Callable[..., object] = getattr(native.NativeKernels, name)
        theirs: Callable[..., object] = getattr(plain, name)
        assert {**ours.__annotations__} == {**theirs.__annotations__}
