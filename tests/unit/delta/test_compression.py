"""A frame is read back as what it was, and never taken for what it is not."""

from __future__ import annotations

import numpy as np
import pytest

from weightsync.delta.coding import Broken, pack, pack_text, unpack


def test_a_plane_comes_back_or_was_not_worth_it() -> None:
    rng = np.random.default_rng(0)
    packed = 0
    for size in (0, 1, 31, 32, 33, 1000, 131_071, 131_072, 131_073, 1 << 20):
        for top in (1, 2, 9, 256):
            plane = rng.integers(0, top, size, np.uint8)
            frame = pack(plane)
            if frame is not None:
                packed += 1
                assert len(frame) < size
                assert unpack(memoryview(frame), size).tobytes() == plane.tobytes()
    assert packed > 15


def test_stored_text_is_smaller_or_the_text() -> None:
    """Where both are of one size, a reader takes what is stored for the text."""
    rng = np.random.default_rng(0)
    sizes = set()
    for size in range(1, 400):
        for repeats in (1, 2):
            text = rng.integers(97, 107, size, np.uint8).tobytes() * repeats
            stored = pack_text(text)
            sizes.add(len(stored) - len(text))
            assert stored == text or len(stored) < len(text)
            if stored != text:
                assert unpack(memoryview(stored), len(text)).tobytes() == text
    assert 0 in sizes
    assert min(sizes) < -1


def test_a_frame_is_not_unpacked_into_another_size() -> None:
    frame = pack(np.zeros(5000, np.uint8))
    assert frame is not None
    for size in (0, 4999, 5001, 1 << 40):
        with pytest.raises(Broken, match="instead of"):
            unpack(memoryview(frame), size)
