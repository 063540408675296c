"""A trainer in a process of its own that attaches and does what it is asked.

    python -m tests.support.attached_trainer ADDRESS

It prints `attached`, then answers each line of its standard input with one:

- `write`: begins a transaction, writes half of all tensors, and queues the other half on its GPU
  behind a second of other work; `written`
- `read`: `alike` where every tensor is what it was at first, else `other`
- `check`: `live`, or why it is no use to go on
- `close`: detaches; `closed`
- `stray`: writes a tensor outside a transaction; `written`
- `late`: detaches, and then writes with a view that it has kept; `fault` where CUDA refuses that
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from weightsync_client import Client, ClientError

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync_client.attach import Attached

__all__ = ["keep_busy"]

_BUSY, _SIZE = 50, 8192


def keep_busy(device: torch.device) -> None:
    """Queue about a second of work on a GPU; on a CPU do nothing."""
    if device.type == "cuda":
        factor = torch.randn(_SIZE, _SIZE, device=device)
        for _ in range(_BUSY):
            factor = (factor @ factor).clamp_(-1, 1)


class _Trainer:
    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._first = {name: attached.read(name) for name in attached.boxes}
        self._open = attached.transaction()

    def write(self) -> str:
        self._open.__enter__()
        boxes = [box for boxes in self._attached.boxes.values() for box in boxes]
        for at, box in enumerate(boxes):
            if at == len(boxes) // 2:
                keep_busy(box.view.device)
            box.view.fill_(0.5)
        return "written"

    def read(self) -> str:
        read, first = self._attached.read, self._first
        return "alike" if all(torch.equal(read(n), first[n]) for n in first) else "other"

    def check(self) -> str:
        try:
            self._attached.check()
        except ClientError as error:
            return str(error.reason.value)
        return "live"

    def close(self) -> str:
        self._attached.close()
        return "closed"

    def stray(self) -> str:
        view = self._kept()
        view.fill_(0.5)
        torch.cuda.synchronize(view.device)
        return "written"

    def late(self) -> str:
        view = self._kept()
        self._attached.close()
        try:
            view.fill_(0.5)
            torch.cuda.synchronize(view.device)
        except RuntimeError:
            return "fault"
        return "written"

    def _kept(self) -> torch.Tensor:
        return next(iter(self._attached.boxes.values()))[0].view


def main() -> None:
    """Do it."""
    trainer = _Trainer(Client(sys.argv[1]).attach())
    known: dict[str, Callable[[], str]] = {
        "write": trainer.write,
        "read": trainer.read,
        "check": trainer.check,
        "close": trainer.close,
        "stray": trainer.stray,
        "late": trainer.late,
    }
    print("attached", flush=True)  # noqa: T201 - this is how it answers
    for line in sys.stdin:
        print(known[line.strip()](), flush=True)  # noqa: T201 - this is how it answers


if __name__ == "__main__":
    main()
