"""Kernels in C and those of numba read alike what the fuzzer holds, and make the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.fuzz.deltas import EXPECT, _use
from tests.fuzz.seeds import CORPUS
from tests.unit.delta.cases import changed_item
from tests.unit.delta.test_kernels import _codings
from weightsync.delta import DeltaError, decode, parse_shard
from weightsync.delta.kernels import chosen, compiled


def _outcomes(blob: bytes, expect: Any) -> list[bytes | None]:
    try:
        delta = parse_shard(blob, expect)
    except DeltaError:
        return []
    return [_use(change) for change in delta.changes.values() if change.name in EXPECT]


@pytest.mark.timeout(300)
def test_both_read_the_corpus_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = [path.read_bytes() for path in sorted((CORPUS / "delta").iterdir())]
    ours = [_outcomes(blob, EXPECT) for blob in blobs]
    monkeypatch.setattr(decode, "chosen", lambda: compiled)
    assert ours == [_outcomes(blob, EXPECT) for blob in blobs]
    assert sum(map(len, ours)) > 20


def test_both_make_the_same_of_pairs_of_tensors() -> None:
    for dtype, width in (("BF16", 2), ("U8", 1), ("F32", 4), ("F64", 8)):
        for density in (0.0, 0.001, 0.05, 0.4):
            item = changed_item("w", dtype, (30_001,), density)
            for coding in _codings(width):
                ours = chosen().encode(item.base, item.new, width, coding)
                theirs = compiled.encode(item.base, item.new, width, coding)
                assert ours.counts == theirs.counts
                for mine, other in zip(
                    (*ours.positions, *ours.values),
                    (*theirs.positions, *theirs.values),
                    strict=True,
                ):
                    assert np.array_equal(mine, other)
