"""One of several trainer processes, each with rows of every tensor on a GPU of its own.

    python -m tests.support.joint_trainer ADDRESS CHECKPOINT

Number and count are those of torch.distributed's environment. It has the engine serve what the
checkpoint holds, prints the version, and ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed

from tests.support.attached_site import content_of
from weightsync_client import Client, ShardedTensor

__all__: list[str] = []


def main() -> None:
    """Do it."""
    address, checkpoint = sys.argv[1:]
    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    distributed.init_process_group("gloo")
    parts = {}
    for name, tensor in content_of(Path(checkpoint)).items():
        rows = torch.tensor_split(tensor, count)
        first = sum(len(part) for part in rows[:number])
        offsets = (first, *[0] * (tensor.dim() - 1))
        parts[name] = ShardedTensor(
            tuple(tensor.shape), "BF16", [(offsets, rows[number].to(device))]
        )
    with Client(address).attach() as attached:
        done = attached.update(parts)
        assert done.report is not None
        print(done.report.version, flush=True)  # noqa: T201 - this is how it answers
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
