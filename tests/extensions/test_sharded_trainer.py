"""The callback in transformers' own Trainer on two processes with FSDP2, and a real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from examples.transformers_callback import make_model
from tests.extensions.sharded_trainer import RANKS, STEPS
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, Version

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(240)

_ROOT = Path(__file__).parents[2]
_WRITER_TIMEOUT_S = 2.0

#: What every training pushes to the server that has an engine.
_PUSHED = {
    "transformers": ["2", "4", "5"],
    "stopped": ["2", "3"],
    "accelerate": ["2", "4", "5"],
}


@pytest.fixture(name="folder", scope="module")
def _folder() -> Iterator[Path]:
    # Short: unix sockets allow 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="wst"))
    make_model().save_pretrained(folder / "tiny")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _server(folder: Path, name: str, *flags: str) -> WeightSyncServer:
    variables = {"WEIGHTSYNC_PUSH_WRITER_TIMEOUT_S": str(_WRITER_TIMEOUT_S)}
    directories = folder / name, folder / f"{name}-state"
    return WeightSyncServer(*directories, flags=flags, variables=variables)


@pytest.fixture(name="server", scope="module")
def _with_engine(folder: Path) -> Iterator[WeightSyncServer]:
    server = _server(folder, "run", "--engine", "memory", "--model", str(folder / "tiny"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(name="ranks", scope="module")
def _ranks(folder: Path, server: WeightSyncServer) -> list[dict[str, Any]]:
    """Return what came of every training, on each rank."""
    bare = _server(folder, "bare", "--engine", f"unix:{folder}/no-engine.sock")
    bare.start()
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    program = [*run, "-m", "tests.extensions.sharded_trainer"]
    done = subprocess.run(
        [sys.executable, *program, str(folder), server.address, bare.address],
        cwd=_ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    bare.stop()
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-6000:])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(name="versions", scope="module")
def _versions(server: WeightSyncServer, ranks: list[dict[str, Any]]) -> dict[str, list[Version]]:
    """Return the versions of every training, oldest first."""
    assert ranks
    with Client(server.address) as client:
        found = sorted(client.versions(), key=lambda version: version.version)
    pushed = iter([version for version in found if version.metadata.get("run_id") == "run"])
    trainings = {name: [next(pushed) for _ in steps] for name, steps in _PUSHED.items()}
    assert list(pushed) == []
    return trainings


def _pulled(server: WeightSyncServer, folder: Path, version: int) -> dict[str, torch.Tensor]:
    target = folder / f"pulled-{version}"
    with Client(server.address) as client:
        client.pull(target, version)
    (file,) = target.glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("training", _PUSHED)
def test_each_pushed_version_is_the_whole_model_to_the_bit(
    server: WeightSyncServer,
    folder: Path,
    ranks: list[dict[str, Any]],
    versions: dict[str, list[Version]],
    training: str,
) -> None:
    assert [rank[training]["error"] for rank in ranks] == [""] * RANKS
    first = load_file(folder / "tiny" / "model.safetensors")
    # Those of an earlier training of this run too, which has pushed the same steps.
    steps = [version.metadata["step"] for version in versions[training]]
    assert steps == _PUSHED[training]
    for version, step in zip(versions[training], steps, strict=True):
        gathered = load_file(folder / training / f"{step}.safetensors")
        pulled = _pulled(server, folder, version.version)
        assert pulled.keys() == gathered.keys() == first.keys()
        assert all(torch.equal(pulled[name], gathered[name]) for name in gathered)
        assert not torch.equal(pulled["lm_head.weight"], first["lm_head.weight"])


def test_ranks_send_each_byte_once_and_the_main_one_logs_it(
    folder: Path, ranks: list[dict[str, Any]], versions: dict[str, list[Version]]
) -> None:
    first = load_file(folder / "tiny" / "model.safetensors")
    size = sum(tensor.nbytes for tensor in first.values())
    pushed = versions["transformers"]
    rows = [[int(version.metadata["step"]), version.version] for version in pushed]
    assert [rank["transformers"]["pushed"] for rank in ranks] == [rows, []]
    # About half of it is this rank's, and no other was sent here to be gathered.
    assert all(0.4 * size < sent < 0.6 * size for sent in ranks[0]["transformers"]["sent"])


def test_one_rank_applies_for_all(
    server: WeightSyncServer, versions: dict[str, list[Version]]
) -> None:
    newest = versions["accelerate"][-1].version
    with Client(server.address) as client:
        assert client.status().models[0].live_version == newest
        assert client.verify(newest).verified


@pytest.mark.parametrize(
    ("training", "steps", "words"),
    [
        ("away", 0, ["SERVER_AWAY; no answer from", "check that weightsync-server runs there"]),
        ("unlike", 1, ["writer 1 of 2 did not arrive", "rank 1: model 'other' is not configured"]),
        ("not_applied", 2, ["ENGINE_AWAY", "step 2 is version 2, which was not applied"]),
    ],
)
def test_what_fails_on_one_rank_is_the_same_error_on_all(
    ranks: list[dict[str, Any]], training: str, steps: int, words: list[str]
) -> None:
    (error,) = {rank[training]["error"] for rank in ranks}
    assert [word for word in words if word not in error] == []
    assert [rank[training]["steps"] for rank in ranks] == [steps] * RANKS


def test_an_error_that_is_logged_ends_the_training_of_none(ranks: list[dict[str, Any]]) -> None:
    assert [rank["logged"]["error"] for rank in ranks] == [""] * RANKS
    assert [rank["logged"]["steps"] for rank in ranks] == [STEPS] * RANKS
    assert ranks[0]["logged"]["failed"] == [2, 4, 5]
