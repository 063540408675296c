"""The store as torchtitan's RL calls it, against a real server; trainer and generator are sharded.

Written down from pytorch/torchtitan at b5bcd76c66d0acb1a08b176d9639425bc55e0b2a, all of it in
torchtitan/experiments/rl: `PolicyTrainer.push_model_state_dict` in actors/trainer.py and
`VLLMGenerator._pull_model_state_dict` in actors/generator.py call two functions of the module `ts`;
components/weight_sync.py and controller.py say when: the pull comes when all ranks of the trainer
have pushed, the next optimizer step and the next push when all have pulled.
"""

from __future__ import annotations

import inspect
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from tests.extensions.titan_ranks import KEY, RANKS, STEPS, run
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, InvalidError
from weightsync_client.integrations import WeightSyncStore

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[WeightSyncServer]:
    # Short: unix sockets allow 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="wsr"))
    server = WeightSyncServer(folder / "run", folder / "state")
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(name="ranks", scope="module")
def _ranks(
    server: WeightSyncServer, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("titan")
    spawn(run, (str(folder), server.address), nprocs=RANKS)  # type: ignore[no-untyped-call] # torch's
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_it_takes_the_calls_of_trainer_and_generator() -> None:
    for method, args, kwargs in (
        (WeightSyncStore.put_state_dict, ({}, KEY), {"direct_rdma": False}),
        (
            WeightSyncStore.get_state_dict,
            (KEY,),
            {"user_state_dict": {}, "strict": False, "direct_rdma": False},
        ),
    ):
        assert inspect.iscoroutinefunction(method)
        inspect.signature(method).bind(None, *args, **kwargs)


def test_a_generator_has_what_the_trainer_has_after_each_pull(ranks: list[dict[str, Any]]) -> None:
    assert [rank["equal"] for rank in ranks] == [[True] * (STEPS + 1)] * RANKS


def test_each_push_is_a_version_with_the_whole_of_it(
    server: WeightSyncServer, ranks: list[dict[str, Any]]
) -> None:
    with Client(server.address) as client:
        versions = [v for v in client.versions() if v.metadata.get("store_key") == KEY]
        tensors = {tensor.name: tensor.torch() for tensor in client.tensors(versions[0].version)}
    assert len({version.content_digest for version in versions}) == STEPS + 1
    assert {version.metadata["team"] for version in versions} == {"red"}
    whole = {name: torch.tensor(values) for name, values in ranks[0]["whole"].items()}
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("differs", "DIGEST_MISMATCH"),
        (
            "nothing",
            "VERSION_UNKNOWN: put the state dict 'none' from the trainer first",
        ),
        ("shape", r"LAYOUT_INVALID: tensor 'x' .* is torch.float32 [3], that of the state dict"),
        ("dtype", r"LAYOUT_INVALID: tensor 'x' .* that of the state dict torch.float16 [3]"),
        ("names", "lacks ['y'], and the state dict lacks ['x']; build both models alike"),
        ("rdma", "REQUEST_INVALID: leave direct_rdma out: it has generators read"),
    ],
)
def test_what_fails_is_an_error_on_every_rank(
    ranks: list[dict[str, Any]], case: str, words: str
) -> None:
    for rank in ranks:
        for part in words.split(" .* "):
            assert part in rank[case]


def test_a_put_that_failed_is_no_version_and_the_next_one_is(ranks: list[dict[str, Any]]) -> None:
    assert [rank["again"] for rank in ranks] == [""] * RANKS


def test_without_strict_names_that_are_not_there_stay(ranks: list[dict[str, Any]]) -> None:
    assert [rank["lenient"] for rank in ranks] == [""] * RANKS
    assert [rank["kept"] for rank in ranks] == [[[0.0] * 3, [1.0] * 2]] * RANKS


def test_arguments_are_checked_when_it_is_made() -> None:
    push: Any = {"stream": 2}
    with pytest.raises(TypeError, match="Did you mean 'streams'"):
        WeightSyncStore("127.0.0.1:1", push=push)
    with pytest.raises(InvalidError, match="server is None"):
        WeightSyncStore(None)  # type: ignore[arg-type]
