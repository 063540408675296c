"""Many strided copies in one call."""

from __future__ import annotations

import numpy as np

from weightsync.delta import kernels


def test_rows_of_a_table_are_copied_and_nothing_else() -> None:
    source = np.arange(4096, dtype=np.uint8)
    target, wanted = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    # Target, source, rows, bytes of one, steps on both sides: odd addresses, gaps on either side,
    # one row, none, and a long one.
    copies = [
        (3, 7, 5, 13, 17, 29),
        (200, 101, 3, 8, 8, 64),
        (400, 500, 1, 1000, 0, 0),
        (1500, 1, 0, 9, 9, 9),
        (1600, 2000, 4, 0, 5, 5),
        (2000, 2500, 2, 16, 100, 16),
    ]
    for to, of, rows, size, step, other in copies:
        for row in range(rows):
            begin = of + row * other
            wanted[to + row * step : to + row * step + size] = source[begin : begin + size]
    table = np.array(copies, np.int64)
    table[:, 0] += target.__array_interface__["data"][0]
    table[:, 1] += source.__array_interface__["data"][0]
    kernels.chosen().copy_rows(table)
    assert np.array_equal(target, wanted)
    assert target.any()
    # Part of a table, which is not contiguous.
    target[:] = 0
    kernels.chosen().copy_rows(table[::5])
    assert np.array_equal(np.flatnonzero(target) >= 3, np.ones(np.count_nonzero(target), bool))
    assert not target[200:2000].any()
    kernels.chosen().copy_rows(table[:0])
