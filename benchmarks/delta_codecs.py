"""The codecs that the delta benchmark compares: ours, int32 and bfloat16 pairs, and dense XOR."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import zstandard

from benchmarks.delta_model import Model
from weightsync.delta import Encoder, Item, apply_change, parse_shard
from weightsync.delta.coding import Coding, Values, pack
from weightsync.delta.encoder import choose_coding, spread
from weightsync.delta.kernels import chosen
from weightsync.model.digest import tensor_digest

__all__ = ["Ours", "Pairs", "Xor"]

#: Dense bytes from which the next tensor begins a new shard: 60 MiB of delta at most.
_SHARD_BYTES = 512 << 20
#: Elements that are looked for pairs at a time.
_PIECE = 1 << 20
_DIGEST = "0" * 32


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _over(
    pool: ThreadPoolExecutor | None, call: Callable[[Any], object], items: Iterable[Any]
) -> None:
    """Call for every item, the first ones first, with two threads of a pool or in this one."""
    if pool:
        spread(pool, 2, call, items)
        return
    for item in items:
        call(item)


class Ours:
    """The delta codec.

    Args:
        model: Both versions.
        target: As many elements as the model, touched.
    """

    def __init__(self, model: Model, target: Any) -> None:
        self._model = model
        self._target = target
        self._by_size = sorted(model.items, key=lambda item: -len(item.new))
        self._expect = {item.name: (item.dtype, item.shape) for item in model.items}
        self._places: dict[str, Any] = {}
        at = 0
        for item in model.items:
            self._places[item.name] = target.view(np.uint8)[at : at + len(item.new)]
            at += len(item.new)
        self._groups: list[list[Item]] = [[]]
        for item in model.items:
            if sum(len(each.new) for each in self._groups[-1]) >= _SHARD_BYTES:
                self._groups.append([])
            self._groups[-1].append(item)

    def encode(self, *, zstd: bool, threads: int = 1) -> list[Any]:
        """Return all shards."""
        with Encoder(zstd=zstd, threads=threads) as encoder:
            return [
                encoder.encode_shard(
                    group, base_content_digest=_DIGEST, layout_digest=_DIGEST, index=index
                ).blob
                for index, group in enumerate(self._groups)
            ]

    def pack_parts(self) -> tuple[float, float]:
        """Return the seconds of comparing and packing, and of zstd."""
        seconds = [0.0, 0.0]
        for item in self._model.items:
            begun = time.perf_counter()
            coding, planes = self._planes(item)
            packed = time.perf_counter()
            _zstd(coding, planes)
            seconds[0] += packed - begun
            seconds[1] += time.perf_counter() - packed
        return seconds[0], seconds[1]

    def pack_all(self, pool: ThreadPoolExecutor | None) -> float:
        """Return the seconds of both together, the largest tensor first."""
        return _timed(lambda: _over(pool, lambda item: _zstd(*self._planes(item)), self._by_size))

    def copy_all(self, pool: ThreadPoolExecutor | None) -> float:
        """Return the seconds of copying all bytes, in halves if there is a pool."""
        middle = len(self._target) // 2
        halves = [slice(None, middle), slice(middle, None)] if pool else [slice(None)]
        return _timed(lambda: _over(pool, self._copy, halves))

    def _copy(self, part: slice) -> None:
        np.copyto(self._target[part], self._model.new[part])

    @staticmethod
    def _planes(item: Item) -> tuple[Coding, list[Any]]:
        coding = choose_coding(item.base, item.new, 2, absolute=False)
        coded = chosen().encode(item.base, item.new, 2, coding)
        return coding, [coded.positions, coded.values]

    def decode_parts(self, shards: list[Any]) -> dict[str, float]:
        """Return the seconds of checking, of patching and of digesting; checks every byte."""
        np.copyto(self._target, self._model.base)
        begun = time.perf_counter()
        changes = self._changes(shards)
        checked = time.perf_counter()
        _over(None, self._apply, changes)
        patched = time.perf_counter()
        digests = [tensor_digest(self._places[change.name].data) for change in changes]
        digested = time.perf_counter()
        if digests != [change.digest for change in changes]:
            raise AssertionError("a tensor does not have its digest")
        self.check()
        return {
            "check": checked - begun,
            "patch": patched - checked,
            "digest": digested - patched,
            "all": digested - begun,
        }

    def patch_all(self, shards: list[Any], pool: ThreadPoolExecutor | None) -> float:
        """Return the seconds of unpacking, patching and recording the undo."""
        np.copyto(self._target, self._model.base)
        changes = sorted(self._changes(shards), key=lambda change: -change.size)
        seconds = _timed(lambda: _over(pool, self._apply, changes))
        self.check()
        return seconds

    def check(self) -> None:
        """Prove that the target is the new version."""
        if not np.array_equal(self._target, self._model.new):
            raise AssertionError("decoding made other bytes")

    def _changes(self, shards: list[Any]) -> list[Any]:
        return [
            change
            for shard in shards
            for change in parse_shard(shard, self._expect).changes.values()
        ]

    def _apply(self, change: Any) -> None:
        apply_change(change, self._places[change.name])


def _zstd(coding: Coding, planes: list[Any]) -> None:
    for streams in planes:
        for at, plane in enumerate(streams):
            # As the encoder does: signs are never packed.
            if streams is planes[0] or at or coding.values is not Values.SM:
                pack(plane)


class Pairs:
    """An int32 index and a bfloat16 value for each change."""

    def __init__(self, model: Model, target: Any) -> None:
        self._model = model
        self._target = target

    def round(self) -> dict[str, float]:
        """Return bytes, and seconds of encoding and of patching."""
        np.copyto(self._target, self._model.base)
        size, seconds, at = 0, [0.0, 0.0], 0
        for item in self._model.items:
            base, new = item.base.view(np.uint16), item.new.view(np.uint16)
            target = self._target[at : at + len(new)]
            for begin in range(0, len(new), _PIECE):
                piece = slice(begin, begin + _PIECE)
                begun = time.perf_counter()
                index, value = chosen().find(base[piece], new[piece])
                packed = time.perf_counter()
                chosen().put(target[piece], index, value)
                seconds[0] += packed - begun
                seconds[1] += time.perf_counter() - packed
                size += 6 * len(index)
            at += len(new)
        if not np.array_equal(self._target, self._model.new):
            raise AssertionError("pairs made other bytes")
        return {"bytes": size, "encode": seconds[0], "decode": seconds[1]}


class Xor:
    """The XOR of all bytes, packed by zstd level 1."""

    def __init__(self, model: Model, target: Any) -> None:
        self._model = model
        self._target = target
        most = max(len(item.new) for item in model.items)
        self._difference = np.zeros(most, np.uint8)
        self._pack = zstandard.ZstdCompressor(level=1)
        self._unpack = zstandard.ZstdDecompressor()

    def round(self) -> dict[str, float]:
        """Return bytes, and seconds of encoding and of patching."""
        np.copyto(self._target, self._model.base)
        size, seconds, at = 0, [0.0, 0.0], 0
        for item in self._model.items:
            target = self._target.view(np.uint8)[at : at + len(item.new)]
            begun = time.perf_counter()
            difference = self._difference[: len(item.new)]
            np.bitwise_xor(item.base, item.new, out=difference)
            frame = self._pack.compress(difference.data)
            packed = time.perf_counter()
            np.bitwise_xor(
                target, np.frombuffer(self._unpack.decompress(frame), np.uint8), out=target
            )
            seconds[0] += packed - begun
            seconds[1] += time.perf_counter() - packed
            size += len(frame)
            at += len(item.new)
        if not np.array_equal(self._target, self._model.new):
            raise AssertionError("XOR made other bytes")
        return {"bytes": size, "encode": seconds[0], "decode": seconds[1]}
