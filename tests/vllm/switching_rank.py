"""One of two ranks that switch between two steps: a process of its own in a real gloo group.

Usage: python -m tests.vllm.switching_rank RANK FOLDER LIMIT_S ROUNDS
ROUNDS is JSON, a list of [plan of failpoints, name of the call]. Each round switches to the version
that is not live and prints one JSON line: the worker's reply, and the seed of what is live, 0 for a
mixture. A rank that ends itself prints nothing for that round.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import distributed

from tests.support.staging import Staging
from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.worker.test_rank import Worker
from weightsync import failpoints
from weightsync.vllm.worker import worker_methods
from weightsync.vllm.worker.between_steps import GlooRankGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _seed(rank: Worker) -> int:
    """Return which checkpoint the live parameters are, as a fresh model would load it."""
    for seed in (1, 2):
        fresh = load_for_real(ToyModel(rank=rank.rank), toy_tensors(seed))
        pairs = zip(rank.model.parameters(), fresh.parameters(), strict=True)
        if all(torch.equal(live, wanted) for live, wanted in pairs):
            return seed
    return 0


def _group(rank: int, folder: Path) -> ProcessGroup:
    where = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    group: ProcessGroup = distributed.new_group(backend="gloo", timeout=timedelta(minutes=30))
    return group


def main() -> None:
    """Adopt one version, then switch as told."""
    number, folder, limit_s = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    group = _group(number, folder)
    vars(worker_methods)["tensor_rank_group"] = lambda: GlooRankGroup(group)
    staging = Staging(folder / f"{number}.sock")
    versions = {seed: staging.stage_files([save(toy_tensors(seed))]) for seed in (1, 2)}
    rank = Worker(load_for_real(ToyModel(rank=number), toy_tensors(1)), staging, number)
    base = "base"
    rank.adopt(versions[1], base)
    for plan, call in json.loads(sys.argv[4]):
        target = versions[3 - _seed(rank)]
        rank.job("prepare", call, target, base=base)
        failpoints.set_plan(plan)
        reply = rank.call("switch", apply_id=call, base_id=base, limit_s=limit_s, call=call)
        failpoints.set_plan("")
        if reply["ok"]:
            base = call
        rank.call("release", keep=[base])
        held = {"whole": reply["content_digest"] == versions[_seed(rank)].content_digest}
        sys.stdout.write(json.dumps({**reply, **held, "seed": _seed(rank)}) + "\n")
        sys.stdout.flush()
    staging.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
