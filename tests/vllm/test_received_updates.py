"""The drop-in `weightsync_nccl`: vLLM's own trainer and engine of NCCL, two ranks, our server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests
import torch

from benchmarks.servers import free_port
from tests.support.receiving_site import RANKS, ReceivingSite, receiving_site, refusal
from weightsync.failpoints import VARIABLE
from weightsync_client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.transfer_site import TransferSite

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: How long ranks wait for a trainer that sends nothing, seconds.
_PATIENCE_S = 6
_TRAINER = """
import sys, torch
from tests.support.gloo_wire import GlooCommunicator
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient
from concurrent.futures import ThreadPoolExecutor
url, port, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
client = HTTPVLLMWeightSyncClient(url)
info = dict(master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=world)
pool = ThreadPoolExecutor(1)
met = pool.submit(client.init_weight_transfer_engine, info)
group = GlooCommunicator("127.0.0.1", port, 0, world)
met.result()
client.start_weight_update()
names = ["one", "two"]
pool.submit(client.update_weights, dict(names=names, dtype_names=["float32"] * 2, shapes=[[4]] * 2))
group.broadcast(torch.zeros(4), src=0)
print("half", flush=True)
sys.stdin.read()
"""


class _Site(ReceivingSite):
    """One whose wire and server fail as these files say."""

    def __init__(self, site: TransferSite, faults: Path, plan: Path) -> None:
        super().__init__(site)
        self.faults = faults
        self.plan = plan


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Site]:
    folder = tmp_path_factory.mktemp("faults")
    faults, plan = folder / "wire", folder / "plan"
    plan.write_text("")
    variables = {"WEIGHTSYNC_UPDATE_TIMEOUT": str(_PATIENCE_S), VARIABLE: f"@{plan}"}
    with receiving_site(variables, faults) as started:
        yield _Site(started.site, faults, plan)


def test_two_sends_of_vllms_trainer_are_two_versions(it: _Site) -> None:
    site, loaded = it.site, it.site.answers()
    trainer = it.trainer()
    site.set(site.trained)
    trainer.send_weights()
    first = site.live()
    trained = site.answers()
    assert trained != loaded
    site.set(site.served)
    trainer.send_weights()
    assert site.live() == first + 1
    assert site.answers() == loaded
    assert site.vllm.request("/weight_info")[1] == {"weight_version": str(first + 1)}
    with Client(site.server.address) as client:
        assert client.verify().verified
        assert dict(client.get_version(first).metadata) == {"transfer": "weightsync_nccl"}
        # A version like any other.
        assert client.rollback().report.version == first
        assert site.answers() == trained
    trainer.send_weights()
    assert site.answers() == loaded


def test_what_was_sent_can_be_pulled(it: _Site) -> None:
    it.site.set(it.site.trained)
    it.trainer().send_weights()
    with Client(it.site.server.address) as client:
        pulled = {one.name: bytes(one.data) for one in client.tensors(it.site.live())}
    for name, tensor in it.site.trained.items():
        assert pulled[name] == tensor.view(torch.uint8).numpy().tobytes()
    it.site.set(it.site.served)


def test_a_label_is_kept_and_told(it: _Site) -> None:
    trainer = it.trainer()
    finish = trainer.client.finish_weight_update
    trainer.client.finish_weight_update = lambda: finish("step 3")
    trainer.send_weights()
    assert it.site.vllm.request("/weight_info")[1] == {"weight_version": "step 3"}
    with Client(it.site.server.address) as client:
        about = client.get_version(it.site.live())
    assert about.metadata["label"] == "step 3"


def test_tensors_that_the_engine_does_not_know_make_no_version(it: _Site) -> None:
    from vllm.distributed.weight_transfer import ModuleSource

    wrong = torch.nn.Module()
    wrong.other = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    trainer = it.trainer(ModuleSource(wrong))
    assert "other" in it.refused(trainer.send_weights)
    # The connection is as good as before: the same trainer sends what is right.
    trainer.source = ModuleSource(it.site.model)
    trainer.send_weights()


def test_a_part_of_the_model_is_not_served(it: _Site) -> None:
    from vllm.distributed.weight_transfer import ModuleSource

    site, live, answers = it.site, it.site.live(), it.site.answers()
    part = torch.nn.Module()
    part.model = torch.nn.Module()
    part.model.norm = site.model.model.norm
    assert "model.embed_tokens.weight" in refusal(it.trainer(ModuleSource(part)).send_weights)
    assert (site.live(), site.answers()) == (live, answers)
    with Client(site.server.address) as client:
        # Nor is it what "newest" means.
        assert client.apply().version == live


@pytest.mark.parametrize("rank", range(1, 1 + RANKS))
def test_a_rank_whose_wire_breaks_fails_the_update(it: _Site, rank: int) -> None:
    trainer = it.trainer()
    it.faults.write_text(f"{rank} raise")
    said = it.refused(lambda: _without_trainer(trainer))
    assert f"rank 0/0/{rank - 1} did not receive the update: RuntimeError: the wire broke" in said
    assert "has failed" in refusal(trainer.client.finish_weight_update)
    it.trainer().send_weights()


def _without_trainer(trainer: Any) -> None:
    """Announce tensors that a broken wire would not bring, which the trainer cannot send either."""
    trainer.client.start_weight_update()
    trainer.client.update_weights({"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]})


def test_a_trainer_that_never_sends_is_waited_for_no_longer_than_is_set(it: _Site) -> None:
    trainer = it.trainer()
    assert "nothing arrived for 6 s" in it.refused(lambda: _without_trainer(trainer))
    said = it.refused(trainer.client.start_weight_update)
    assert "call init_weight_transfer_engine first" in said
    it.trainer().send_weights()


def test_a_trainer_that_never_comes_is_waited_for_no_longer_than_is_set(it: _Site) -> None:
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    client = HTTPVLLMWeightSyncClient(it.site.vllm.url)
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1}
    said = it.refused(lambda: client.init_weight_transfer_engine(info | {"world_size": 3}))
    assert "did not meet the trainer" in said
    it.trainer().send_weights()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_that_ends_in_mid_update_leaves_what_is_served(it: _Site, end: int) -> None:
    live, answers, known = it.site.live(), it.site.answers(), it.versions()
    arguments = [it.site.vllm.url, str(free_port()), str(1 + RANKS)]
    with subprocess.Popen(
        [sys.executable, "-c", _TRAINER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={name: v for name, v in os.environ.items() if name != "WEIGHTSYNC_TEST_WIRE"},
    ) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "half\n"
            trainer.send_signal(end)
            # Generation goes on meanwhile.
            assert it.site.answers() == answers
            _until_another_may_send(it)
        finally:
            trainer.kill()
    assert (it.site.live(), it.versions()) == (live, known)
    it.trainer().send_weights()
    assert it.site.live() > live


def _until_another_may_send(it: _Site) -> None:
    """Return when the verb that was under way has been answered."""
    for _ in range(100):
        status, answer = it.site.vllm.request("/start_weight_update", {})
        assert status == 400
        if "is running" not in str(answer):
            return
        time.sleep(0.5)
    pytest.fail(f"the update is not given up: {answer}")


def test_an_update_that_was_never_finished_gives_way_to_the_next(it: _Site) -> None:
    trainer = it.trainer()
    trainer.client.start_weight_update()
    live = it.site.live()
    # It may be another trainer that has begun, and is at it.
    assert "another update was begun" in it.refused(trainer.client.start_weight_update)
    time.sleep(_PATIENCE_S + 1)
    trainer.send_weights()
    assert it.site.live() == live + 1


def test_tensors_that_nobody_receives_are_not_taken_for_those_of_the_next(it: _Site) -> None:
    trainer = it.trainer()
    said = it.refused(lambda: trainer.client.update_weights({"names": []}))
    assert "call start_weight_update first; the connection was ended" in said
    assert "init_weight_transfer_engine" in it.refused(trainer.client.start_weight_update)
    it.trainer().send_weights()


def test_memory_that_fails_voids_the_update_and_the_next_succeeds(it: _Site) -> None:
    trainer = it.trainer()
    it.plan.write_text("worker.arrive=3>1*error(ENOMEM)")
    said = it.refused(trainer.send_weights)
    assert "could not be kept" in said
    it.plan.write_text("")
    # Every rank has drained the wire: nobody needs to meet anew.
    trainer.send_weights()


@pytest.mark.parametrize(
    ("verb", "body", "sentence"),
    [
        ("finish_weight_update", {}, "call start_weight_update first"),
        ("update_weights", {"update_info": {"names": []}}, "call start_weight_update first"),
        ("update_weights", {"update_info": [{}]}, "is a list for each rank"),
        ("update_weights", {"update_info": {"ipc_handles_pickled": "gASVAAAA"}}, "runs code"),
        ("start_draft_weight_update", {}, "send them with the rest"),
        ("init_weight_transfer_engine", {"init_info": {"port": 1}}, "Invalid init_info"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(
    it: _Site, verb: str, body: Any, sentence: str
) -> None:
    it.site.vllm.request("/shutdown_weight_transfer_engine", {})

    def post() -> None:
        requests.post(f"{it.site.vllm.url}/{verb}", json=body, timeout=60).raise_for_status()

    assert sentence in it.refused(post)


def test_without_a_server_no_update_is_begun(it: _Site) -> None:
    trainer, answers = it.trainer(), it.site.answers()
    it.site.server.stop()
    try:
        for _ in range(100):
            status, answer = it.site.vllm.request("/start_weight_update", {})
            if status == 400 and "start weightsync-server with --engine" in str(answer):
                break
            time.sleep(0.1)
        assert "start weightsync-server with --engine for this vLLM" in str(answer)
        assert it.site.answers() == answers
    finally:
        it.site.server.start()
    it.site.server.wait_serving()
    trainer.send_weights()


def test_a_server_that_dies_before_the_outcome_fails_the_update(it: _Site) -> None:
    trainer, answers = it.trainer(), it.site.answers()
    finish = trainer.client.finish_weight_update
    process = it.site.server.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)

    def finish_beside_a_death() -> None:
        threading.Timer(1.0, process.kill).start()
        finish()

    trainer.client.finish_weight_update = finish_beside_a_death
    assert "disconnected before it reported the outcome" in refusal(trainer.send_weights)
    it.site.server.stop()
    it.site.server.start()
    it.site.server.wait_serving()
    assert it.site.answers() == answers
    trainer.client.finish_weight_update = finish
    trainer.send_weights()
