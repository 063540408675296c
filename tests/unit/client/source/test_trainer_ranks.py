"""Ranks that act together, in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.multiprocessing.spawn import spawn

from weightsync.errors import Reason
from weightsync_client import ClientError
from weightsync_client.errors import refuse
from weightsync_client.source.flat_parameters import TrainerRanks, holds_parts

if TYPE_CHECKING:
    from collections.abc import Callable

# Each rank imports PyTorch anew, seconds of a processor that others may need as well.
pytestmark = pytest.mark.timeout(180)

RANKS = 3


def _refused(rank: int) -> str:
    if rank == 0:
        return "done"
    raise refuse(Reason.ENGINE_AWAY, f"refused on {rank}", version=str(rank))


def _faulty(rank: int) -> str:
    if rank == 2:
        msg = "a fault"
        raise TypeError(msg)
    return _refused(rank)


def _outcome(call: Callable[[], Any]) -> list[Any]:
    try:
        return ["", call()]
    except ClientError as error:
        notes = getattr(error, "__notes__", [])
        return [type(error).__name__, str(error.reason), error.message, error.metadata, notes]
    except (TypeError, RuntimeError) as error:
        return [type(error).__name__, str(error)]


def _run(rank: int, folder: str) -> None:
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    ranks = TrainerRanks()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    plain = holds_parts(model)
    fully_shard(model)
    parts = [holds_parts(model)]
    model(torch.zeros(1, 8))
    parts.append(holds_parts(model))
    flat = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
    parts.append(holds_parts(flat))
    found = {
        "agreed": ranks.agree(rank + 7),
        "keys": [ranks.next_key(), ranks.next_key()],
        "parts": [plain, *parts],
        "all": _outcome(lambda: ranks.together(lambda: rank)),
        "refused": _outcome(lambda: ranks.together(lambda: _refused(rank))),
        "faulty": _outcome(lambda: ranks.together(lambda: _faulty(rank))),
        "first": _outcome(lambda: ranks.on_first(lambda: rank)),
        "first_refused": _outcome(lambda: ranks.on_first(lambda: _refused(rank + 1))),
        "another": TrainerRanks().next_key(),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    # One that ends while others read what it has sent last may be aborted by gloo's threads.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(name="found", scope="module")
def _found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    spawn(_run, (str(folder),), nprocs=RANKS)  # type: ignore[no-untyped-call] # torch's
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_they_agree_on_a_value_and_on_keys(found: list[dict[str, Any]]) -> None:
    assert [rank["agreed"] for rank in found] == [7] * RANKS
    assert len({(*rank["keys"], rank["another"]) for rank in found}) == 1
    assert len({*found[0]["keys"], found[0]["another"]}) == 3


def test_each_has_its_own_result(found: list[dict[str, Any]]) -> None:
    assert [rank["all"] for rank in found] == [["", 0], ["", 1], ["", 2]]


def test_rank_0_alone_does_it(found: list[dict[str, Any]]) -> None:
    assert [rank["first"] for rank in found] == [["", 0], ["", None], ["", None]]


def test_an_error_of_some_is_raised_on_all(found: list[dict[str, Any]]) -> None:
    notes = ["rank 2: refused on 2"]
    error = ["UnavailableError", "ENGINE_AWAY", "refused on 1", {"version": "1"}, notes]
    assert [rank["refused"] for rank in found] == [error] * RANKS
    first = ["UnavailableError", "ENGINE_AWAY", "refused on 1", {"version": "1"}, []]
    assert [rank["first_refused"] for rank in found] == [first] * RANKS


def test_a_fault_of_one_is_none_that_others_go_on_after(found: list[dict[str, Any]]) -> None:
    others = ["RuntimeError", "rank 2 of the trainer failed: TypeError: a fault"]
    assert [rank["faulty"] for rank in found] == [others, others, ["TypeError", "a fault"]]


def test_parts_are_seen_also_where_fsdp_shows_them_whole(found: list[dict[str, Any]]) -> None:
    assert [rank["parts"] for rank in found] == [[False, True, True, True]] * RANKS
