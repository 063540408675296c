"""The copier in C on memory that ends where it should; a program of test_copying."""

from __future__ import annotations

import sys

import numpy as np

from tests.support.guard_pages import guarded, guarded_copy
from weightsync.model.digest import tensor_digest
from weightsync_client.transport.copying import NativeCopier


def main() -> None:
    """Copy texts of many sizes from and to either end of a page, in pieces of many sizes."""
    generator = np.random.default_rng(7)
    sizes = [241, 960, *range(1023, 1090), 2048, 5000, 16 << 10, 40_001]
    done = 0
    for size in sizes:
        text = generator.integers(0, 256, size, np.uint8)
        for at_end in (True, False):
            source = guarded_copy(text, at_end=at_end)
            target = guarded(size, at_end=not at_end)
            for step in (1024, 3072, 64 << 10):
                target[:] = 0
                copier = NativeCopier(size, sys.argv[1])
                for at in range(0, size, step):
                    piece = memoryview(source)[at : at + step]
                    copier.update(piece, memoryview(target)[at : at + step])
                assert copier.digest() == tensor_digest(text.tobytes()), (size, at_end, step)
                assert np.array_equal(target, text), (size, at_end, step)
                done += 1
    sys.stdout.write(f"{done}\n")


if __name__ == "__main__":
    main()
