"""A trainer that computes in the engine's own memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.content import as_ints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weightsync_client import ApplyReport
    from weightsync_client.attach import Attached

__all__ = ["AttachedTrainer"]


class AttachedTrainer:
    """Answers as `benchmarks.gpu.trainer.Trainer` does; times are those of `time.perf_counter`.

    Args:
        address: Of the server.
    """

    def __init__(self, address: str) -> None:
        import torch

        from weightsync_client import Client

        self._torch = torch
        self._client = Client(address)
        self._attached: Attached | None = None

    def attach(self) -> dict[str, Any]:
        """Attach; returns how long it took until every view was there."""
        begin = time.perf_counter()
        self._attached = self._client.attach()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "tensors": len(self._attached.boxes)}

    def detach(self) -> dict[str, Any]:
        """Detach."""
        self._live.close()
        self._attached = None
        return {}

    def read(self) -> dict[str, Any]:
        """Read every parameter once, twice over; returns how long the second time took."""
        seconds = 0.0
        for _ in range(2):
            self._live.settle()
            begin = time.perf_counter()
            for view in self._views():
                # Words of four bytes, as the limit is measured.
                words = view.view(self._torch.float32) if view.shape[-1] % 2 == 0 else view
                words.sum()
            self._live.settle()
            seconds = time.perf_counter() - begin
        return {"seconds": seconds}

    def step(self, mask: int) -> dict[str, Any]:
        """Change bits of every value in a transaction; see `_written`."""

        def write() -> None:
            for view in self._views():
                as_ints(view).bitwise_xor_(mask)

        return self._written(write)

    def put(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Have the engine serve tensors.

        Returns:
            `version`, `digest_s` of the slowest rank, and when this was `called`, when the engine
            was said to generate, and when all had `ended`.
        """
        called = time.perf_counter()
        transaction = self._live.update(tensors, background=True, cache="keep")
        served = time.perf_counter()
        report = _reported(transaction.result())
        ended = time.perf_counter()
        times = {"called": called, "served": served, "ended": ended}
        return {"version": report.version, "digest_s": _digest_s(report), **times}

    def _written(self, write: Callable[[], None]) -> dict[str, Any]:
        """Write in a transaction.

        Returns:
            `version`, `digest_s` of the slowest rank, and when it was `called`, when this trainer
            might write, when it had and called for the commit, and when that had `ended`.
        """
        called = time.perf_counter()
        with self._live.transaction(cache="keep") as transaction:
            begun = time.perf_counter()
            write()
            self._live.settle()
            written = time.perf_counter()
        ended = time.perf_counter()
        times = {"called": called, "begun": begun, "written": written, "ended": ended}
        report = _reported(transaction.report)
        return {"version": report.version, "digest_s": _digest_s(report), **times}

    @property
    def _live(self) -> Attached:
        if self._attached is None:
            msg = "attach first"
            raise RuntimeError(msg)
        return self._attached

    def _views(self) -> list[Any]:
        boxes = self._live.boxes.values()
        return [part.view for parts in boxes for part in parts]


def _reported(report: ApplyReport | None) -> ApplyReport:
    if report is None:
        msg = "the transaction has ended without a report"
        raise RuntimeError(msg)
    return report


def _digest_s(report: ApplyReport) -> float:
    return max(rank.verify_s for rank in report.ranks)
