"""A vLLM that dies or is restarted in an apply: the new one serves nothing that is not proved."""

from __future__ import annotations

import threading

import pytest

from tests.support.faulty_site import FaultySite
from weightsync.errors import Reason, WeightSyncError

# vLLM is started once per test.
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.battery,
    pytest.mark.timeout(900),
    pytest.mark.parametrize(
        "shared_site", [(1, False), (2, False)], ids=["tp1", "tp2"], indirect=True
    ),
]


@pytest.mark.parametrize(
    "fault",
    [
        "worker.commit=1*panic",
        "worker.half=1*panic",
        "worker.written=1*panic",
        "bridge.paused=1*panic",
        "bridge.called=1>1*panic",
    ],
)
def test_a_rank_or_bridge_that_dies_is_never_served_and_a_new_vllm_gets_the_live_version(
    site: FaultySite, fault: str
) -> None:
    old = site.ask()
    version = site.push()
    with site.watched():
        site.arm(fault)
        refusal = site.try_apply(version)
        assert refusal is not None
        assert refusal.reason in (Reason.ENGINE_FENCED, Reason.ENGINE_AWAY)
        assert site.met()
        site.disarm()
        site.vllm.stop()
    site.vllm.start()
    assert site.recover() == old


def test_a_vllm_that_restarts_between_prepare_and_commit_is_proved_first(
    site: FaultySite,
) -> None:
    old = site.ask()
    version = site.push()
    site.arm("apply.prepared=1*stop")
    refusals: list[WeightSyncError | None] = []
    # vLLM takes its time to start.
    applying = threading.Thread(target=lambda: refusals.append(site.try_apply(version, 290)))
    applying.start()
    assert site.met(20)
    site.vllm.stop()
    site.vllm.start()
    assert "no weightsync-server has verified" in site.refusal()
    site.let_go_on()
    applying.join(60)
    assert refusals[0] is not None
    assert refusals[0].reason is Reason.ENGINE_AWAY
    assert site.recover() == old
