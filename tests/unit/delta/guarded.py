"""Kernels in C on memory that ends where it should: python -m tests.unit.delta.guarded [avx2].

Every buffer lies against a page that may not be touched, at its end or at its beginning, so a look
or a write outside ends this process. Streams are legal, worst cases, and hostile ones with sizes
that follow from their counts; each result must be NumPy's. An argument chooses the level.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.guard_pages import guarded, guarded_copy
from weightsync.delta.coding import Broken, Coding, Counts, Positions, Values, plane_sizes
from weightsync.delta.kernels import native, plain

if TYPE_CHECKING:
    from collections.abc import Callable

compiled = native.NativeKernels(sys.argv[1] if len(sys.argv) > 1 else native.levels()[-1])
#: As in kernels.c.
_BLOCK = 1 << 13

_WHERE = [position for position in Positions if position is not Positions.NONE]


class _TightArena(native._Arena):
    """Room of exactly what the kernels were promised."""

    def room(self, plane: int, used: int, more: int) -> None:
        grown = guarded(used + more)
        grown[:used] = self.planes[plane][:used]
        self.planes[plane] = grown
        self.addresses[plane] = native.address(grown)


def _pair(rng: np.random.Generator, width: int, elements: int, density: float, kind: str) -> Any:
    base = rng.integers(0, 256, elements * width, np.uint8)
    new = base.copy()
    where = np.flatnonzero(rng.random(elements) < density)
    words: Any = new.view(f"<u{width}")
    if kind == "wide":
        words[where] ^= words.dtype.type(1 << (8 * width - 1))
    elif kind == "near":
        words[where] += rng.choice([1, 1, 1, -1, 2, -3], len(where)).astype(words.dtype)
    else:
        words[where] = rng.integers(0, 1 << 63, len(where)).astype(words.dtype)
    return base, new


def _same(ours: Any, theirs: Any) -> None:
    assert ours.counts == theirs.counts, (ours.counts, theirs.counts)
    for mine, other in zip(
        (*ours.positions, *ours.values), (*theirs.positions, *theirs.values), strict=True
    ):
        assert mine.tobytes() == other.tobytes()


def check_encoders() -> int:
    """Encode tensors of awkward sizes; return how many."""
    done = 0
    rng = np.random.default_rng(1)
    block = _BLOCK
    sizes = [1, 63, 64, 65, 1000, block - 1, block, block + 65, 3 * block + 7]
    native._PIECE = 2 * block
    for width in (1, 2, 4, 8):
        for elements in sizes:
            for density, kind in (
                (0.0, "near"),
                (0.001, "near"),
                (0.02, "any"),
                (0.3, "near"),
                (1.0, "wide"),
            ):
                base, new = _pair(rng, width, elements, density, kind)
                for at_end in (True, False):
                    before, after = (guarded_copy(each, at_end=at_end) for each in (base, new))
                    for each in ((64, 64), (1024, 1024), (1024, 5000), (100, 101)):
                        theirs = plain.count(base, new, width, *each)
                        assert compiled.count(before, after, width, *each) == theirs
                    for where in _WHERE:
                        for what in (Values.ABS, Values.SM) if width == 2 else (Values.ABS,):
                            coding = Coding(where, what)
                            compiled._arena = _TightArena()
                            _same(
                                compiled.encode(before, after, width, coding),
                                plain.encode(base, new, width, coding),
                            )
                            done += 1
    return done


def _outcome(call: Callable[..., None], *arguments: Any) -> bytes | None:
    """Return what the last argument holds afterwards, or None for a refusal."""
    try:
        call(*arguments)
    except Broken:
        return None
    return bytes(arguments[-1].tobytes())


def _both(name: str, planes: Any, *facts: Any, out: int, dtype: str) -> bool:
    """Call a decoder of both modules; return whether the input was accepted."""
    single = name == "decode_bitmap"
    given = [np.frombuffer(plane, np.uint8) for plane in planes]
    theirs = _outcome(
        getattr(plain, name), given[0] if single else given, *facts, np.zeros(out, dtype)
    )
    for at_end in (True, False):
        tight = [guarded_copy(plane, at_end=at_end) for plane in given]
        room = guarded(out, dtype, at_end=at_end)
        ours = _outcome(getattr(compiled, name), tight[0] if single else tight, *facts, room)
        assert ours == theirs, (name, planes, facts, ours, theirs)
    return theirs is not None


def _hostile(rng: np.random.Generator, size: int) -> bytes:
    """Return bytes of which many are those that mean something."""
    choice = rng.choice([0, 1, 254, 255, *rng.integers(0, 256, 4).tolist()], size)
    return choice.astype(np.uint8).tobytes()


def check_decoders(rounds: int) -> dict[str, int]:
    """Decode hostile planes; return how many of them were legal by chance, by coding."""
    rng = np.random.default_rng(2)
    legal = dict.fromkeys(("gap8", "gap16", "bitmap", "sm"), 0)
    for marked in range(1, 70):
        # Whole vectors, and some entries more: all marks, and a skip before the last of them.
        for gaps in (bytes(marked), bytes(marked - 1) + b"\xff\0"):
            legal["gap8"] += _both("decode_gaps", [gaps], 1 << 20, out=marked, dtype="<i4")
    assert legal["gap8"] == 2 * 69
    for _ in range(rounds):
        changed = int(rng.integers(1, 150))
        elements = changed + int(rng.choice([0, 1, 5, 500, 1 << 20, 1 << 33]))
        skips = int(rng.integers(0, 4))
        dtype = "<i4" if elements < 1 << 31 else "<i8"
        entries = changed + skips
        for name, count in (("gap8", 1), ("gap16", 2)):
            planes = [_hostile(rng, entries) for _ in range(count)]
            marked = entries - planes[0].count(255)
            # As many as are marked, or nearly, so that it is the last entries that tell.
            honest = count == 1 and rng.random() < 0.5
            out = max(marked + int(rng.choice([0, 0, 1, -1])), 1) if honest else changed
            legal[name] += _both("decode_gaps", planes, elements, out=out, dtype=dtype)
        if elements < 1 << 20:
            plane = [_hostile(rng, -(-elements // 8))]
            bits = int(np.unpackbits(np.frombuffer(plane[0], np.uint8)).sum())
            for count in {bits, changed} - {0}:
                legal["bitmap"] += _both("decode_bitmap", plane, elements, out=count, dtype=dtype)
        legal["sm"] += _check_signed(rng, changed)
    return legal


def _check_signed(rng: np.random.Generator, changed: int) -> int:
    tail = (1 << (changed % 8 or 8)) - 1
    planes = [bytearray(_hostile(rng, -(-changed // 8))) for _ in range(2)]
    if rng.random() < 0.8:
        for plane in planes:
            plane[-1] &= tail
    large = int(np.unpackbits(np.frombuffer(planes[1], np.uint8)).sum())
    magnitudes = _hostile(rng, max(large + int(rng.choice([0, 0, 0, 1, -1])), 0))
    wide = max(magnitudes.count(255) + int(rng.choice([0, 0, 0, 1, -1])), 0)
    high = (
        bytes(rng.choice([1, 2, 127], wide).tolist()) if rng.random() < 0.8 else _hostile(rng, wide)
    )
    low = bytes(rng.integers(1, 256, wide).tolist())
    sizes = plane_sizes(
        Coding(Positions.GAP8, Values.SM), 2, 1 << 20, Counts(changed, 0, len(magnitudes), wide)
    )[1]
    given = [bytes(planes[0]), bytes(planes[1]), magnitudes, low, high]
    assert list(map(len, given)) == list(sizes)
    return _both("decode_sm", given, out=changed, dtype="<u2")


def check_patches() -> int:
    """Patch tensors at their first and last elements; return how many."""
    done = 0
    for width in (1, 2, 4, 8):
        for size in (1, 2, 7, 64, 1000):
            for dtype in ("<i4", "<i8"):
                for at_end in (True, False):
                    done += _check_patch(width, size, dtype, at_end=at_end)
    return done


def _check_patch(width: int, size: int, dtype: str, *, at_end: bool) -> int:
    rng = np.random.default_rng(size)
    content = rng.integers(0, 256, size * width, np.uint8)
    index = np.unique(np.append(rng.integers(0, size, size // 2 + 1), [0, size - 1])).astype(dtype)
    value = rng.integers(0, 256, len(index) * width, np.uint8).view(f"<u{width}")
    arguments = [content, index, value, np.zeros(len(index), value.dtype)]
    calls = ["scatter", *(["shift"] if width == 2 else [])]
    for name in calls:
        theirs = [each.copy() for each in arguments]
        ours = [guarded_copy(each, at_end=at_end) for each in arguments]
        getattr(plain, name)(*theirs)
        getattr(compiled, name)(*ours)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.tobytes() == other.tobytes()
    for wrong in (-1, size, (1 << 31) - 1):
        outside = ours[1].copy()
        outside[-1] = wrong
        before = ours[0].tobytes()
        assert _outcome(compiled.scatter, ours[0], guarded_copy(outside), *ours[2:]) is None
        assert ours[0].tobytes() == before
    return len(calls)


def main() -> None:
    """Check everything and tell what was done."""
    done = check_encoders(), check_patches(), *check_decoders(600).values()
    sys.stdout.write(" ".join(map(str, done)))


if __name__ == "__main__":
    main()
