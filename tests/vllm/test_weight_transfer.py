"""VLLM's own trainer loop drives WeightSync: a real vLLM, a real server, vLLM's factory and client.

The development endpoints are on here, because vLLM's HTTP client needs them.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import requests
import torch

from tests.support.transfer_site import transfer_site
from weightsync_client import Client, ClientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.transfer_site import TransferSite

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def site() -> Iterator[TransferSite]:
    with transfer_site("weightsync") as site:
        yield site


@pytest.fixture
def make_trainer(site: TransferSite) -> Iterator[Callable[..., Any]]:
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


def test_that_anybody_may_call_the_verbs_is_told(site: TransferSite) -> None:
    (warning,) = site.server.wait_serving().engine.warnings
    assert "without VLLM_SERVER_DEV_MODE=1" in warning


def test_two_sends_serve_what_the_trainer_has(
    site: TransferSite, make_trainer: Callable[..., Any]
) -> None:
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
    site: TransferSite, make_trainer: Callable[..., Any]
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
    site: TransferSite, make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(site.vllm.complete, "hello world", 400)
        while not re.search(r"num_requests_running{.*} 1\.0", site.vllm.request("/metrics")[1]):
            time.sleep(0.01)
        assert site.vllm.request("/pause?mode=keep", {})[0] == 200
        assert not answer.done()
        trainer.send_weights()
        assert len(answer.result(60).tokens) == 400


def test_a_pause_of_vllm_may_be_in_force(
    site: TransferSite, make_trainer: Callable[..., Any]
) -> None:
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
    site: TransferSite, make_trainer: Callable[..., Any], verb: str, body: Any, sentence: str
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


def test_verbs_in_any_order_leave_no_reply_in_vllms_queues(site: TransferSite) -> None:
    # With another backend each of these fails on both ranks, and the reply of the second is taken
    # for that of our next call, so that the engine is fenced until vLLM is started anew.
    for verb in ("finish_weight_update", "start_weight_update", "start_weight_update"):
        assert site.vllm.request(f"/{verb}", {})[0] == 200
    with Client(site.server.address) as client:
        assert client.verify().verified
    assert all(site.answers())


def test_without_a_client_no_verb_is_called(site: TransferSite) -> None:
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
