"""Faults inside the apply of a real vLLM: the old version whole, the new one whole, or fenced.

Failpoints stand in the worker methods, the bridge and the server itself; one plan holds for all
three. While they fail, vLLM is asked without a break, and every answer must be one of the two
versions' or a refusal.
"""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from tests.support.faulty_site import LEASE_S, FaultySite
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("whole"),
]


def _apply(
    site: FaultySite, plan: str, *, fenced: bool = False, name: str = ""
) -> tuple[str, str, WeightSyncError | None]:
    """Apply under faults; return the content before, the content asked for, and the refusal."""
    old = site.ask()
    version = site.push(name)
    new = site.content[version]
    with site.watched():
        site.arm(plan)
        refusal = site.try_apply(version)
        assert site.met(), "the fault was never met"
        if fenced:
            assert site.refusal()
        site.let_go_on()
        site.recover()
    return old, new, refusal


@pytest.mark.parametrize("point", ["worker.commit", "worker.half", "worker.written"])
def test_a_rank_that_fails_in_its_commit_is_restored(site: FaultySite, point: str) -> None:
    old, _, refusal = _apply(site, f"{point}=1*error(ENOMEM)")
    assert refusal is not None
    assert refusal.reason is Reason.APPLY_RESTORED
    assert "Cannot allocate memory" in refusal.message
    assert site.ask() == old
    assert "503" not in site.served


@pytest.mark.parametrize("point", ["worker.patch", "worker.half", "worker.written"])
def test_a_rank_that_fails_in_a_patch_is_restored(site: FaultySite, point: str) -> None:
    other = site.beside("b")
    old, _, refusal = _apply(site, f"{point}=1*error(ENOMEM)", name=other)
    assert refusal is not None
    assert refusal.reason is Reason.APPLY_RESTORED
    assert site.ask() == old
    assert "503" not in site.served


def test_a_rank_that_lies_about_a_patch_is_not_believed(site: FaultySite) -> None:
    other = site.beside("c")
    old, _, refusal = _apply(site, "worker.reply=1*lie(content_digest)", name=other)
    assert refusal is not None
    assert refusal.reason is Reason.APPLY_RESTORED
    assert site.ask() == old


def test_a_patch_that_misses_a_parameter_is_restored(site: FaultySite) -> None:
    version = site.push(site.beside("b"))
    with site.watched():
        site.fault(skip="model.layers.0.mlp.down_proj.weight")
        refusal = site.try_apply(version)
    assert refusal is not None
    assert refusal.reason is Reason.APPLY_RESTORED
    assert "down_proj" in refusal.message
    assert site.ask() == "b"


def test_a_patch_and_its_rollback_are_small_and_compared_as_a_whole(site: FaultySite) -> None:
    version = site.push(site.beside("b"))
    with site.watched():
        report = site.apply(version)
        assert report.strategy == pb.APPLY_STRATEGY_PATCH
        assert site.checked(version) == pb.LIVE_CHECK_PASSED
        back = site.server.stub.Rollback(pb.RollbackRequest(model="default"), timeout=60).report
        assert back.strategy == pb.APPLY_STRATEGY_PATCH
        assert 0 < back.written_bytes == report.written_bytes < 200_000
    assert site.ask() == "b"
    assert set(site.served) <= {"b", "c"}


def test_a_bit_outside_a_patch_is_found_within_a_minute_and_healed(site: FaultySite) -> None:
    # That of a tensor which no nudge changes.
    version = site.push(site.beside("b"))
    site.fault(flip="model.layers.1.mlp.gate_up_proj.weight")
    assert site.apply(version).strategy == pb.APPLY_STRATEGY_PATCH
    end = time.monotonic() + 60
    while not site.violations():
        assert time.monotonic() < end, "it was not found"
        time.sleep(0.02)
    site.recover()
    assert site.checked(version) == pb.LIVE_CHECK_PASSED
    assert site.ask() == "c"
    assert site.violations() == 1
    # A new one has counted nothing.
    site.restart_server()


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ("apply_id", "answered for apply 'falsified'"),
        ("content_digest", "proved falsified"),
        ("rank", "answered as rank 'falsified'"),
        ("call", "answered another call"),
    ],
)
def test_a_rank_that_lies_about_its_commit_is_not_believed(
    site: FaultySite, lie: str, told: str
) -> None:
    old, _, refusal = _apply(site, f"worker.reply=1*lie({lie})")
    assert refusal is not None
    assert refusal.reason is Reason.APPLY_RESTORED
    assert told in refusal.message
    assert site.ask() == old


def test_a_rank_that_tells_another_version_is_not_believed(site: FaultySite) -> None:
    live = site.server.wait_serving().live_content_digest
    old, _, refusal = _apply(site, f"worker.reply=1*lie(content_digest={live})")
    assert refusal is not None
    assert refusal.reason is Reason.APPLY_RESTORED
    assert f"proved {live}" in refusal.message
    assert site.ask() == old


def test_ranks_that_always_lie_leave_the_engine_fenced(site: FaultySite) -> None:
    version = site.push()
    with site.watched():
        site.arm("worker.reply=lie(content_digest)\nworker.tell=lie(content_digest)")
        refusal = site.try_apply(version)
        assert refusal is not None
        assert refusal.reason is Reason.ENGINE_FENCED
        assert "falsified" in site.refusal()
        site.recover()


@pytest.mark.parametrize("confusion", ["twice", "lost", "stale"])
def test_replies_that_are_not_one_per_rank_and_call_are_no_success(
    site: FaultySite, confusion: str
) -> None:
    # The first call of an apply is its prepare, the second its commit.
    old, _, refusal = _apply(site, f"bridge.replies=1>1*lie({confusion})")
    assert refusal is not None
    assert refusal.reason is Reason.APPLY_RESTORED
    assert site.ask() == old


def test_a_rank_that_answers_late_is_fenced_and_then_asked(site: FaultySite) -> None:
    _, new, refusal = _apply(site, "worker.written=1*sleep(4)", fenced=True)
    assert refusal is not None
    assert refusal.reason is Reason.ENGINE_FENCED
    assert "did not answer weightsync_commit" in refusal.message
    assert site.ask() == new, "the ranks hold it whole, and proved it"


def test_a_rank_that_hangs_is_fenced_until_it_goes_on(site: FaultySite) -> None:
    version = site.push()
    with site.watched():
        site.arm("worker.half=1*stop")
        refusal = site.try_apply(version)
        assert refusal is not None
        assert refusal.reason is Reason.ENGINE_FENCED
        assert "did not answer weightsync_commit" in site.refusal()
        (model,) = site.server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models
        assert model.engine.state == pb.ENGINE_STATE_FENCED
        # Nothing is sent behind the call that hangs.
        again = site.try_apply(version)
        assert again is not None
        assert again.reason is Reason.ENGINE_FENCED
        site.recover()
    back = site.server.stub.Rollback(pb.RollbackRequest(model="default"), timeout=60)
    assert site.ask() == site.content[back.report.version]


@pytest.mark.parametrize("point", ["worker.prepare", "worker.map", "apply.begin", "apply.prepared"])
def test_a_fault_before_the_pause_changes_nothing(site: FaultySite, point: str) -> None:
    old, _, refusal = _apply(site, f"{point}=1*error")
    assert refusal is not None
    assert site.ask() == old
    assert set(site.served) == {old}


@pytest.mark.parametrize("point", ["worker.release", "worker.state", "bridge.renew"])
def test_a_fault_that_decides_nothing_is_got_over(site: FaultySite, point: str) -> None:
    _apply(site, f"{point}=error\nworker.written=1*sleep(1)")


@pytest.mark.parametrize(
    "point", ["bridge.pause", "bridge.paused", "apply.intent", "apply.pause", "journal.write"]
)
def test_a_pause_that_fails_or_whose_answer_is_lost(site: FaultySite, point: str) -> None:
    old, _, refusal = _apply(site, f"{point}=1*error")
    assert refusal is not None
    assert site.ask() == old


@pytest.mark.parametrize("point", ["bridge.pause", "bridge.resume"])
def test_what_vllm_takes_too_long_for_fences_until_it_is_asked(
    site: FaultySite, point: str
) -> None:
    _, _, refusal = _apply(site, f"{point}=1*sleep(4)", fenced=True)
    assert refusal is not None
    assert refusal.reason in (Reason.ENGINE_FENCED, Reason.ENGINE_AWAY)
    assert "did not answer" in refusal.message


@pytest.mark.parametrize("plan", ["bridge.resume=2*error", "bridge.resumed=1*error"])
def test_a_resume_that_fails_or_whose_answer_is_lost_is_tried_and_asked_again(
    site: FaultySite, plan: str
) -> None:
    _, new, refusal = _apply(site, plan)
    assert refusal is None
    assert site.ask() == new


def test_a_resume_that_fails_for_long_is_not_ready_until_it_succeeds(site: FaultySite) -> None:
    version = site.push()
    with site.watched():
        site.arm("bridge.resume=error")
        refusal = site.try_apply(version)
        assert refusal is not None
        assert refusal.reason is Reason.ENGINE_AWAY
        (model,) = site.server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models
        assert model.engine.state != pb.ENGINE_STATE_SERVING
        assert site.recover() == site.content[version]


@pytest.mark.parametrize("point", ["bridge.call", "bridge.called"])
@pytest.mark.parametrize("skip", [0, 1], ids=["prepare", "commit"])
def test_a_worker_call_that_fails_in_the_bridge(site: FaultySite, point: str, skip: int) -> None:
    old, _, refusal = _apply(site, f"{point}={skip}>1*error")
    assert refusal is not None
    assert site.ask() == old


@pytest.mark.parametrize("point", ["apply.commit", "apply.committed", "apply.resume"])
def test_a_fault_of_the_server_inside_the_pause(site: FaultySite, point: str) -> None:
    _, _, refusal = _apply(site, f"{point}=1*error")
    assert refusal is not None


#: Where the server dies, and what more has to fail for it to get there.
_DEATHS = {
    "apply.begin": "",
    "apply.prepared": "",
    "apply.intent": "",
    "journal.write": "",
    "apply.pause": "",
    "apply.commit": "",
    "apply.committed": "",
    "apply.resume": "",
    "apply.resumed": "",
    "apply.done": "",
    "apply.restore": "worker.half=1*error",
    "apply.restored": "worker.half=1*error",
    "apply.fence": "worker.half=2*error",
}
_OFTEN = ("apply.commit", "apply.committed", "apply.fence")


@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=[] if p in _OFTEN else [pytest.mark.battery]) for p in _DEATHS],
)
def test_a_server_that_dies_leaves_one_whole_version_or_a_fence(
    site: FaultySite, point: str
) -> None:
    version = site.push()
    with site.watched():
        site.arm(f"{point}=1*panic\n{_DEATHS[point]}")
        refusal = site.try_apply(version)
        assert refusal is not None
        assert refusal.reason is Reason.SERVER_AWAY
        assert (point, "panic") in [(name, action) for name, action, _ in site.met()]
        # The lease ends the pause without any server.
        time.sleep(3)
        seen = site.ask()
        assert seen in (*site.pair, "503")
        if seen == "503":
            assert site.refusal()
        site.restart_server()
        site.recover()


def test_a_server_that_dies_while_it_reconciles(site: FaultySite) -> None:
    version = site.push()
    with site.watched():
        site.arm("apply.committed=panic\nworker.half=1*error\napply.reconcile=panic")
        site.try_apply(version)
        with contextlib.suppress(RuntimeError):
            site.restart_server()
        assert site.server.process is not None
        site.server.process.wait(10)
        assert [name for name, action, _ in site.met() if action == "panic"] == [
            "apply.committed",
            "apply.reconcile",
        ]
        site.recover()


@pytest.mark.battery
def test_a_lease_that_cannot_be_ended_well_ends_in_a_fence(site: FaultySite) -> None:
    version = site.push()
    with site.watched():
        site.arm("apply.commit=1*panic\nbridge.expire=error")
        site.try_apply(version)
        time.sleep(LEASE_S + 1)
        assert "the lease ran out" in site.refusal()
        site.recover()


@pytest.mark.battery
@pytest.mark.parametrize("point", ["bridge.paused", "bridge.resumed", "bridge.called"])
def test_an_answer_of_the_bridge_that_never_comes(site: FaultySite, point: str) -> None:
    # Longer than anybody waits for it.
    _apply(site, f"{point}=1*sleep(25)")


@pytest.mark.battery
def test_a_lease_that_is_not_renewed_ends_the_pause_behind_the_servers_back(
    site: FaultySite,
) -> None:
    _apply(site, "bridge.renew=error\nworker.written=1*sleep(2.3)")
    # The server is stopped in the pause and goes on when it is over.
    old = site.ask()
    version = site.push()
    with site.watched():
        site.arm("apply.commit=1*stop")
        refusals: list[WeightSyncError | None] = []
        applying = threading.Thread(target=lambda: refusals.append(site.try_apply(version)))
        applying.start()
        assert site.met(10)
        time.sleep(LEASE_S + 1)
        assert site.ask() == old
        site.let_go_on()
        applying.join(60)
        assert refusals[0] is not None
        assert refusals[0].reason is Reason.ENGINE_AWAY
        assert site.recover() == old


def test_what_is_not_all_there_is_not_applied(site: FaultySite) -> None:
    old = site.ask()
    begin = pb.BeginPushRequest(model="default", shard_count=1)
    push = site.server.stub.BeginPush(begin, timeout=20)
    refusal = site.try_apply(push.version)
    assert refusal is not None
    assert refusal.reason is Reason.PUSH_INCOMPLETE
    assert site.ask() == old
    site.server.stub.AbortPush(pb.AbortPushRequest(push_id=push.push_id), timeout=20)


def test_a_rollback_goes_back_over_an_epoch_and_only_once(site: FaultySite) -> None:
    stub = site.server.stub
    stub.AcquireEpoch(pb.AcquireEpochRequest(model="default"), timeout=5)
    first = site.push()
    site.apply(first)
    stub.AcquireEpoch(pb.AcquireEpochRequest(model="default"), timeout=5)
    second = site.push()
    site.apply(second)
    request = pb.RollbackRequest(model="default", idempotency_key="once")
    answer = stub.Rollback(request, timeout=60)
    assert (answer.report.version, answer.rejected_version) == (first, second)
    assert stub.Rollback(request, timeout=60) == answer
    assert site.server.wait_serving().live_version == first
    assert site.ask() == site.content[first]


def test_a_rollback_during_an_apply_waits_for_it(site: FaultySite) -> None:
    old = site.ask()
    version = site.push()
    with site.watched():
        site.arm("apply.commit=1*sleep(1)")
        refusals: list[WeightSyncError | None] = []
        applying = threading.Thread(target=lambda: refusals.append(site.try_apply(version)))
        applying.start()
        assert site.met(30), refusals
        answer = site.server.stub.Rollback(pb.RollbackRequest(model="default"), timeout=60)
        applying.join(60)
    assert refusals == [None]
    assert answer.rejected_version == version
    assert site.ask() == old
