"""VLLM's own trainer loop drives WeightSync: a real vLLM, a real server, vLLM's factory and client.

The development endpoints are on here, because vLLM's HTTP client needs them.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests
import torch

from tests.support.models import make_checkpoint
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, ClientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.vllm, pytest.mark.alone, pytest.mark.timeout(300)]

_PROMPTS = ("hello world", "the quick brown fox", "a")
_FLAGS = ("--weight-transfer-config", '{"backend": "weightsync"}')


class Site:
    """A vLLM with our backend, a server beside it, and a model that a trainer has."""

    def __init__(self, root: Path) -> None:
        from transformers import AutoModelForCausalLM

        folders = [make_checkpoint(root / f"{n}", dtype="bfloat16", seed=n) for n in range(2)]
        self.vllm = VllmServer(
            folders[0],
            root / "run",
            # What one rank of several refuses must leave nothing in vLLM's queues.
            tp=2,
            dtype="bfloat16",
            flags=_FLAGS,
            variables={"VLLM_SERVER_DEV_MODE": "1"},
        )
        self.server = WeightSyncServer(root / "run", root / "state", flags=("--same-host",))
        self.model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.bfloat16)
        other = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.bfloat16)
        self.trained = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.served = {name: p.detach().clone() for name, p in other.named_parameters()}

    def set(self, weights: dict[str, torch.Tensor]) -> None:
        """Have the trainer's model hold these."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def answers(self) -> list[Any]:
        """Return greedy tokens with their logprobs."""
        return [self.vllm.complete(prompt) for prompt in _PROMPTS]

    def live(self) -> int:
        """Return the version that the server serves."""
        return self.server.wait_serving().live_version


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    # Unix sockets allow 107 bytes, which pytest's own folders exceed.
    root = Path(tempfile.mkdtemp(prefix="wt-"))
    site = Site(root)
    try:
        site.server.start()
        site.vllm.start()
        site.server.wait_serving()
        yield site
    finally:
        site.server.stop()
        site.vllm.stop()
        shutil.rmtree(root)


@pytest.fixture
def make_trainer(site: Site) -> Iterator[Callable[..., Any]]:
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        ModuleSource,
        WeightTransferTrainerFactory,
    )

    from weightsync_client.integrations import WeightSyncTrainerInitInfo

    made = []

    def make(source: Any = None, *, url: str = "", **options: Any) -> Any:
        trainer = WeightTransferTrainerFactory.trainer_init(
            WeightSyncTrainerInitInfo(site.server.address, rank=0, **options),
            client=HTTPVLLMWeightSyncClient(url or site.vllm.url),
            source=source or ModuleSource(site.model),
        )
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.shutdown()


def test_that_anybody_may_call_the_verbs_is_told(site: Site) -> None:
    (warning,) = site.server.wait_serving().engine.warnings
    assert "without VLLM_SERVER_DEV_MODE=1" in warning


def test_two_sends_serve_what_the_trainer_has(site: Site, make_trainer: Callable[..., Any]) -> None:
    loaded = site.answers()
    trainer = make_trainer(run_id="mine")
    site.set(site.trained)
    trainer.send_weights()
    first = trainer.last.push.version
    assert site.live() == first
    trained = site.answers()
    assert trained != loaded
    site.set(site.served)
    trainer.send_weights()
    assert site.live() > first
    assert site.answers() == loaded
    # The same once more is a version as well, and what vLLM labels its outputs with.
    trainer.send_weights()
    assert site.live() == trainer.last.push.version
    assert site.vllm.request("/weight_info")[1] == {"weight_version": str(site.live())}
    with Client(site.server.address) as client:
        assert client.verify().verified
        about = client.get_version(first)
        assert dict(about.metadata) == {"run_id": "mine", "sync": "1"}


def test_a_send_that_fails_leaves_the_version_that_is_served(
    site: Site, make_trainer: Callable[..., Any]
) -> None:
    from vllm.distributed.weight_transfer import ModuleSource

    wrong = torch.nn.Module()
    wrong.other = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    before, live = site.answers(), site.live()
    with pytest.raises(ClientError, match="other"):
        make_trainer(ModuleSource(wrong)).send_weights()
    assert site.live() == live
    assert site.answers() == before
    site.set(site.trained)
    make_trainer().send_weights()
    assert site.answers() != before


def test_a_request_that_a_pause_of_vllm_keeps_goes_on_after_the_apply(
    site: Site, make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(site.vllm.complete, "hello world", 400)
        while not re.search(r"num_requests_running{.*} 1\.0", site.vllm.request("/metrics")[1]):
            time.sleep(0.01)
        assert site.vllm.request("/pause?mode=keep", {})[0] == 200
        assert not answer.done()
        trainer.send_weights()
        assert len(answer.result(60)["tokens"]) == 400


def test_a_pause_of_vllm_may_be_in_force(site: Site, make_trainer: Callable[..., Any]) -> None:
    before = site.answers()
    trainer = make_trainer()
    for mode in ("keep", "abort"):
        assert site.vllm.request(f"/pause?mode={mode}", {})[0] == 200
        site.set(site.served if mode == "keep" else site.trained)
        trainer.send_weights()
        # The apply ended the pause.
        assert (site.answers() == before) == (mode == "abort")
        assert site.vllm.request("/resume", {})[0] == 200
    assert site.answers() == before


@pytest.mark.parametrize(
    ("verb", "body", "sentence"),
    [
        (
            "init_weight_transfer_engine",
            {"init_info": {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2}},
            "init_info has master_address, master_port, world_size, but",
        ),
        (
            "update_weights",
            {"update_info": {"names": ["a"], "ipc_handles_pickled": "gASVAAAA"}},
            "update_info has ipc_handles_pickled, names, but",
        ),
        ("update_weights", {"update_info": [{"version": 1}]}, "update_info has a list"),
        ("update_weights", {"update_info": {"version": 999}}, "serves weight version '"),
        ("start_draft_weight_update", {}, "leave this verb out"),
    ],
)
def test_what_is_none_of_ours_is_refused_and_the_engine_goes_on(
    site: Site, make_trainer: Callable[..., Any], verb: str, body: Any, sentence: str
) -> None:
    live, before = site.live(), site.answers()
    status, answer = site.vllm.request(f"/{verb}", body)
    assert status == 400
    assert sentence in str(answer)
    # A stale reply would be taken for that of the next call.
    with Client(site.server.address) as client:
        assert client.verify().verified
    assert (site.live(), site.answers()) == (live, before)
    make_trainer().send_weights()
    assert site.live() > live


def test_verbs_in_any_order_leave_no_reply_in_vllms_queues(site: Site) -> None:
    # With another backend each of these fails on both ranks, and the reply of the second is taken
    # for that of our next call, so that the engine is fenced until vLLM is started anew.
    for verb in ("finish_weight_update", "start_weight_update", "start_weight_update"):
        assert site.vllm.request(f"/{verb}", {})[0] == 200
    with Client(site.server.address) as client:
        assert client.verify().verified
    assert all(site.answers())


def test_without_a_client_no_verb_is_called(site: Site) -> None:
    from weightsync_client.integrations import WeightSyncTrainerEngine, WeightSyncTrainerInitInfo

    weights = list(site.served.items())
    about = WeightSyncTrainerInitInfo(site.server.address, rank=0)
    trainer = WeightSyncTrainerEngine.trainer_init(about, source=weights)
    live = site.live()
    trainer.send_weights()
    trainer.shutdown()
    assert site.live() > live


def test_a_vllm_that_is_away_is_found_before_the_first_send(
    make_trainer: Callable[..., Any],
) -> None:
    with pytest.raises(requests.ConnectionError):
        make_trainer(url="http://127.0.0.1:9")
