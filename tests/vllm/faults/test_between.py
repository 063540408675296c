"""Switches between two steps of a real vLLM that fail: one whole version, fenced, or no engine.

As test_apply_vllm, in pause mode between_steps: vLLM is asked without a break, and every answer
must be one of the two versions' or a refusal.
"""

from __future__ import annotations

import pytest

from tests.support.faulty_site import FaultySite
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("whole"),
]


@pytest.fixture
def site(site: FaultySite) -> FaultySite:
    site.pause.mode = pb.PAUSE_MODE_BETWEEN_STEPS
    return site


def _tp(site: FaultySite) -> int:
    (model,) = site.server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models
    return len(model.engine.ranks)


def _apply(site: FaultySite, plan: str) -> tuple[str, str, WeightSyncError]:
    """Apply under faults; return the content before, the content asked for, and the refusal."""
    old = site.ask()
    version = site.push()
    with site.watched():
        site.arm(plan)
        refusal = site.try_apply(version)
        assert site.met(), "the fault was never met"
        site.let_go_on()
        site.recover()
    assert refusal is not None
    return old, site.content[version], refusal


def test_a_switch_pauses_nothing_and_neither_does_the_way_back(site: FaultySite) -> None:
    old = site.ask()
    version = site.push()
    with site.watched():
        report = site.apply(version)
        assert site.ask() == site.content[version] != old
        request = pb.RollbackRequest(model="default", pause=site.pause)
        back = site.server.stub.Rollback(request, timeout=60).report
        assert site.ask() == old
    assert set(site.served) <= {old, site.content[version]}
    for done in (report, back):
        assert done.pause.mode == pb.PAUSE_MODE_BETWEEN_STEPS
        phases = done.phases
        assert phases.pause.ToNanoseconds() == phases.resume.ToNanoseconds() == 0
        assert 0 < phases.commit.ToNanoseconds() < phases.paused_total.ToNanoseconds()


@pytest.mark.parametrize("point", ["worker.commit", "worker.half", "worker.written"])
def test_a_rank_that_fails_is_back_before_the_next_step(site: FaultySite, point: str) -> None:
    old, _, refusal = _apply(site, f"{point}=1*error(ENOMEM)")
    assert refusal.reason is Reason.APPLY_RESTORED
    assert "Cannot allocate memory" in refusal.message
    assert site.ask() == old
    assert not {"503", "away"} & set(site.served)


def test_a_rank_that_says_no_is_believed(site: FaultySite) -> None:
    # Each rank is asked first whether it can begin, then whether all is written.
    old, _, refusal = _apply(site, "worker.opinion=1>1*lie(no)")
    assert refusal.reason is Reason.APPLY_RESTORED
    assert site.ask() == old
    assert "503" not in site.served


def test_what_was_not_written_is_put_back(site: FaultySite) -> None:
    old, version = site.ask(), site.push()
    with site.watched():
        site.fault(skip="model.layers.0.mlp.down_proj.weight")
        refusal = site.try_apply(version)
    assert refusal is not None
    assert refusal.reason is Reason.APPLY_RESTORED
    assert "down_proj" in refusal.message
    assert site.ask() == old


@pytest.mark.parametrize("lie", ["content_digest", "apply_id", "rank", "call"])
def test_a_rank_whose_answer_is_none_is_fenced_and_asked(site: FaultySite, lie: str) -> None:
    _, new, refusal = _apply(site, f"worker.reply=1*lie({lie})")
    assert refusal.reason is Reason.ENGINE_FENCED
    # All had agreed before that answer: they hold it.
    assert site.ask() == new


def test_a_rank_that_answers_late_is_fenced_and_then_asked(site: FaultySite) -> None:
    # Longer than a switch may take, and shorter than the other ranks wait.
    if _tp(site) > 1:
        pytest.skip("the other ranks wait for less than the server does, and end")
    _, new, refusal = _apply(site, "worker.written=1*sleep(7)")
    assert refusal.reason is Reason.ENGINE_FENCED
    assert "did not answer a switch" in refusal.message
    assert site.ask() == new


def test_a_rank_that_hangs_never_leaves_a_mixture(site: FaultySite) -> None:
    old, new, refusal = _apply(site, "worker.half=1*stop")
    assert refusal.reason is Reason.ENGINE_FENCED
    # Ranks that hang alike go on when they can. Where one was late the others have ended, and vLLM
    # was started anew.
    assert site.ask() in ({new} if _tp(site) == 1 else {old, new})


def test_an_engine_that_cannot_go_back_ends(site: FaultySite) -> None:
    plan = "worker.half=1*error(ENOMEM);worker.restore=1*error(EIO)"
    old, _, refusal = _apply(site, plan)
    assert refusal.reason is Reason.ENGINE_FENCED
    assert site.ask() == old, "vLLM was started anew and given what was live"
    assert {"500", "503", "away"} & set(site.served)


@pytest.mark.parametrize(
    "point",
    # Each costs a start of vLLM; `make test` meets the one in the midst of a write.
    [
        pytest.param("worker.commit", marks=pytest.mark.battery),
        "worker.half",
        pytest.param("worker.written", marks=pytest.mark.battery),
    ],
)
def test_a_rank_that_dies_takes_the_engine_with_it(site: FaultySite, point: str) -> None:
    old, _, refusal = _apply(site, f"{point}=1*panic")
    assert refusal.reason is Reason.ENGINE_FENCED
    assert site.ask() == old


@pytest.mark.parametrize(
    ("point", "done"),
    [("apply.commit", False), ("bridge.switched", True), ("apply.committed", True)],
)
def test_a_server_that_dies_finds_one_whole_version(
    site: FaultySite, point: str, *, done: bool
) -> None:
    # In vLLM's own process it is only slow; the server dies of it all the same.
    plan = f"{point}=1*sleep(1)\napply.committed=1*panic" if "bridge" in point else ""
    old, new, refusal = _apply(site, plan or f"{point}=1*panic")
    assert refusal.reason is Reason.SERVER_AWAY
    assert site.ask() == (new if done else old)
    assert "503" not in site.served
