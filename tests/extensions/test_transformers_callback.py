"""The example of the Trainer's callback as a user types it, and a resumed run on a real server."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from examples.transformers_callback import make_model, make_rows
from tests.support.processes import stop
from tests.support.serving import wait_serving
from weightsync_client import Client, Durability
from weightsync_client.integrations import WeightSyncCallback

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(180)

_ROOT = Path(__file__).parents[2]
_START_S = 60.0
_COMMAND = Path(sys.executable).with_name("weightsync-server")


def _example(*arguments: str, processes: int = 1) -> list[str]:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [*command, "examples/transformers_callback.py", *arguments],
        cwd=_ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    return done.stdout.splitlines()


@pytest.fixture
def address() -> Iterator[str]:
    """A server whose engine serves the example's first checkpoint."""
    with tempfile.TemporaryDirectory(prefix="wst") as name:
        folder = Path(name)
        make_model().save_pretrained(folder / "tiny")
        address = f"unix:{folder}/server.sock"
        server = subprocess.Popen(
            [
                *(_COMMAND, "--engine", "memory", "--model", folder / "tiny", "--metrics", ""),
                *("--listen", address, "--run-dir", folder / "run"),
                *("--state-dir", folder / "state"),
            ]
        )
        try:
            with Client(address) as client:
                wait_serving(server, client, _START_S)
            yield address
        finally:
            assert stop(server) == 0


def _committed(address: str) -> list[tuple[int, str]]:
    """Return number and step of every pushed version, oldest first."""
    with Client(address) as client:
        versions = [v for v in client.versions() if v.durability == Durability.COMMITTED]
    return [(v.version, v.metadata["step"]) for v in reversed(versions) if "step" in v.metadata]


@pytest.mark.parametrize(
    ("processes", "sharded"),
    [
        pytest.param(1, False, marks=pytest.mark.battery),
        pytest.param(2, False, marks=pytest.mark.battery),
        (2, True),
    ],
)
def test_the_example_serves_each_pushed_step(
    address: str, tmp_path: Path, processes: int, *, sharded: bool
) -> None:
    tiny = tmp_path / "tiny"
    _example("--init", str(tiny))
    first = load_file(tiny / "model.safetensors")
    options = ("--server", address, "--steps", "5", "--every", "2")
    shard = ("--shard", str(tiny)) if sharded else ()
    lines = _example(*options, *shard, processes=processes)
    lines = [line for line in lines if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == [
        "step 2: version 2",
        "step 4: version 3",
        "step 5: version 4",
    ]
    with Client(address) as client:
        assert client.status().models[0].live_version == 4
        assert client.verify(4).verified
        client.pull(tmp_path / "live")
    (file,) = (tmp_path / "live").glob("*.safetensors")
    live = load_file(file)
    assert live.keys() == first.keys()
    assert not any(torch.equal(live[name], first[name]) for name in live if "proj" in name)


class _Crash(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Ends a training as a fault would."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 7:
            raise RuntimeError("crash")


def _trainer(folder: Path, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {"max_steps": 8, "save_steps": 3, "save_strategy": "steps"}
    settings |= {"use_cpu": True, "disable_tqdm": True} | arguments
    return Trainer(
        make_model(),
        TrainingArguments(str(folder), **settings),
        train_dataset=make_rows(64),
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("apply", [False, True])
def test_a_resumed_run_makes_no_second_version_of_a_step(
    address: str, tmp_path: Path, *, apply: bool
) -> None:
    def callback(server: Client | str) -> WeightSyncCallback:
        return WeightSyncCallback(server, every=2, apply=apply and {"pause": "keep"})

    # A client of the callback's own is closed when training has ended, which a crash keeps from it.
    with Client(address) as client, pytest.raises(RuntimeError, match="crash"):
        _trainer(tmp_path, callback(client), _Crash()).train()
    before = [(2, "2"), (3, "4"), (4, "6")]
    assert _committed(address) == before
    _trainer(tmp_path, callback(address)).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-3")
    )
    with Client(address) as client:
        live = client.status().models[0].live_version
    if apply:
        # Applies only go up, and the engine serves what the trainer has.
        assert _committed(address) == [*before, (5, "4"), (6, "6"), (7, "8")]
        assert live == 7
    else:
        assert _committed(address) == [*before, (5, "8")]
        assert live == 1
