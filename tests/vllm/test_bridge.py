"""The bridge against one real vLLM: adopt, prepare, pause, commit, verify, resume, restore."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.support.vllm_fixtures import Bench, running_bench
from weightsync.engine.v1 import engine_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.staging import Version

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = "The quick brown"
#: Enough that a step takes longer than vLLM's API process needs for what it yields. Outputs that
#: pile up there keep its loop, and with it the bridge, from answering until the request is over.
LAYERS = 12


@pytest.fixture(scope="module")
def bench(checkpoint: Callable[..., Path], run_dir: Path) -> Iterator[Bench]:
    variables = {"VLLM_SERVER_DEV_MODE": "1"}
    model = checkpoint(seed=1, layers=LAYERS)
    with running_bench(model, run_dir, variables=variables) as bench:
        yield bench


@pytest.fixture(scope="module")
def versions(bench: Bench, checkpoint: Callable[..., Path]) -> tuple[Version, Version]:
    return bench.staging.stage(checkpoint(seed=1, layers=LAYERS)), bench.staging.stage(
        checkpoint(seed=2, layers=LAYERS)
    )


@pytest.fixture(scope="module")
def before_adoption(bench: Bench) -> dict[str, Any]:
    """What the engine did before a server had proved its weights."""
    return {
        "state": bench.client.health(),
        "completion": bench.vllm.request("/v1/completions", {"model": "model", "prompt": "x"}),
        "models": bench.vllm.request("/v1/models"),
        "open": [bench.vllm.request(p)[0] for p in ("/health", "/metrics", "/version")],
        "resume": _code(lambda: bench.client.resume("", 1, "0" * 32)),
        "commit": bench.client.commit("unknown"),
        "hello": bench.client.call("hello"),
    }


@pytest.fixture(scope="module")
def adopted(
    bench: Bench, before_adoption: dict[str, Any], versions: tuple[Version, Version]
) -> tuple[str, str]:
    """Apply ids of the adopted version and of another one; both prepared, the first is live."""
    first = bench.client.adopt(versions[0])
    second, reports = bench.client.prepare(versions[1])
    assert reports[0]["phase"] == "ready", reports
    assert reports[0]["proved"] is None
    return first, second


@pytest.fixture(autouse=True)
def first_version_serves(
    bench: Bench, adopted: tuple[str, str], versions: tuple[Version, Version]
) -> Iterator[None]:
    """Begin every test with the adopted version live and serving."""
    state = bench.client.health().state
    held = bench.client.call("state")[0]["content_digest"]
    if state == pb.BRIDGE_STATE_SERVING and held == versions[0].content_digest:
        yield
        return
    lease = bench.client.pause() if state == pb.BRIDGE_STATE_SERVING else ""
    bench.client.commit(adopted[0])
    bench.client.resume(lease, 1, versions[0].content_digest)
    yield


def _code(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


def _wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)


def test_unproved_engine_refuses_requests_but_tells_that_it_lives(
    before_adoption: dict[str, Any],
) -> None:
    seen = before_adoption
    assert seen["state"].state == pb.BRIDGE_STATE_UNRECONCILED
    assert seen["completion"][0] == 503
    assert "no weightsync-server has verified" in seen["completion"][1]["error"]["message"]
    assert seen["models"][0] == 503
    assert seen["open"] == [200, 200, 200]
    assert seen["resume"] == grpc.StatusCode.FAILED_PRECONDITION
    assert not seen["commit"][0]["ok"]
    assert "prepare it first" in seen["commit"][0]["error"]
    assert seen["hello"][0]["plain"] is True


def test_apply_changes_the_tokens_and_restore_brings_them_back(
    bench: Bench, adopted: tuple[str, str], versions: tuple[Version, Version]
) -> None:
    first = bench.vllm.complete(PROMPT)
    replies = bench.client.apply(versions[1], 2, apply_id=adopted[1])
    assert replies[0]["written_bytes"] > 5_000_000
    second = bench.vllm.complete(PROMPT)
    assert second.tokens != first.tokens
    bench.client.apply(versions[0], 3, apply_id=adopted[0])
    assert bench.vllm.complete(PROMPT) == first


def test_a_framework_does_not_end_a_pause_or_lift_a_fence_of_ours(
    bench: Bench, versions: tuple[Version, Version]
) -> None:
    lease = bench.client.pause()
    status, answer = bench.vllm.request("/resume", {})
    assert status == 409
    assert "leave out this resume" in answer["error"]["message"]
    assert bench.vllm.request("/is_paused")[1] == {"is_paused": True}
    bench.client.resume(lease, 1, versions[0].content_digest)
    assert bench.vllm.request("/is_paused")[1] == {"is_paused": False}
    bench.client.fence("kept by a test")
    status, answer = bench.vllm.request("/resume", {})
    assert status == 503
    assert "kept by a test" in answer["error"]["message"]
    assert bench.vllm.request("/health")[0] == 200
    bench.client.resume("", 1, versions[0].content_digest)
    # A pause of vLLM's own is vLLM's own to end.
    assert bench.vllm.request("/pause?mode=keep", {})[0] == 200
    assert bench.vllm.request("/resume", {})[0] == 200
    assert bench.vllm.complete(PROMPT).tokens


def test_a_wake_up_of_a_framework_starts_nothing_that_stands_still(
    bench: Bench, versions: tuple[Version, Version]
) -> None:
    order = {"model": "model", "prompt": "One two", "max_tokens": 480, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(bench.vllm.request, "/v1/completions", order)
        _wait_for(lambda: bench.client.health().requests == 1)
        lease = bench.client.pause(clear_cache=False)
        # It waits for the end of the pause.
        woken = pool.submit(bench.vllm.request, "/wake_up", {})
        assert not _generates(bench)
        assert not woken.done()
        assert bench.vllm.request("/is_paused")[1] == {"is_paused": True}
        bench.client.resume(lease, 1, versions[0].content_digest)
        assert woken.result()[0] == 200
        _wait_for(lambda: _generates(bench))
        # One that sleeps can be woken whatever it is fenced for, and takes no step.
        assert bench.vllm.request("/sleep?level=0&mode=keep", {})[0] == 200
        assert bench.client.health().sleeping
        bench.client.fence("kept by a test")
        tokens = _counted(bench, "vllm:generation_tokens_total")
        for _ in range(2):
            status, answer = bench.vllm.request("/wake_up", {})
            assert (status, answer["status"]) == (200, "awake"), answer
            health = bench.client.health()
            assert (health.state, health.sleeping) == (pb.BRIDGE_STATE_FENCED, False)
            assert not _generates(bench)
        assert _counted(bench, "vllm:generation_tokens_total") == tokens
        bench.client.resume("", 1, versions[0].content_digest)
        status, answer = asked.result()
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 480


def test_memory_of_keys_that_is_given_back_is_a_sleep(bench: Bench) -> None:
    # On a CPU vLLM cannot do it, but notes that it sleeps.
    assert bench.vllm.request("/pause?mode=abort", {})[0] == 200
    if bench.vllm.request("/release_kv_cache_memory", {})[0] == 404:
        pytest.skip("this vLLM gives back all of its memory or none")
    assert bench.client.health().sleeping
    with pytest.raises(grpc.RpcError, match="wake the engine up"):
        bench.client.pause()
    assert bench.vllm.request("/wake_up", {})[0] == 200
    assert not bench.client.health().sleeping
    assert bench.vllm.complete(PROMPT).tokens


def _generates(bench: Bench) -> bool:
    """Return whether vLLM makes tokens within a second."""
    before = _counted(bench, "vllm:generation_tokens_total")
    time.sleep(1.0)
    return _counted(bench, "vllm:generation_tokens_total") > before


def test_hello_refuses_another_protocol(bench: Bench) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        bench.client.stub.Hello(pb.HelloRequest(protocol=99), timeout=10)
    assert "same weightsync release" in (caught.value.details() or "")


def test_only_our_worker_methods_can_be_called(bench: Bench) -> None:
    request = pb.CallWorkersRequest(method="shutdown", args_json=b"{}")
    with pytest.raises(grpc.RpcError) as caught:
        bench.client.stub.CallWorkers(request, timeout=10)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    request = pb.CallWorkersRequest(method="weightsync_state", args_json=b"[1]")
    with pytest.raises(grpc.RpcError):
        bench.client.stub.CallWorkers(request, timeout=10)


def test_a_flipped_bit_in_a_live_parameter_is_caught_by_commit_and_restored(
    bench: Bench, adopted: tuple[str, str], versions: tuple[Version, Version]
) -> None:
    first = bench.vllm.complete(PROMPT)
    lease = bench.client.pause()
    bench.fault(flip="model.layers.1.mlp.down_proj.weight")
    (reply,) = bench.client.commit(adopted[1])
    assert not reply["ok"]
    assert reply["mismatched"] == ["model.layers.1.mlp.down_proj.weight"]
    assert reply["content_digest"] == ""
    assert bench.client.call("state")[0]["dirty"] is True
    code = _code(lambda: bench.client.resume(lease, 2, versions[1].content_digest))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    (reply,) = bench.client.commit(adopted[0])
    assert reply["content_digest"] == versions[0].content_digest
    bench.client.resume(lease, 1, versions[0].content_digest)
    assert bench.vllm.complete(PROMPT) == first


def test_a_skipped_slice_is_caught(bench: Bench, adopted: tuple[str, str]) -> None:
    bench.client.pause()
    bench.fault(skip="model.layers.0.self_attn.qkv_proj.bias")
    (reply,) = bench.client.commit(adopted[1])
    assert reply["mismatched"] == ["model.layers.0.self_attn.qkv_proj.bias"]
    bench.client.fence("test")


def test_a_bit_flipped_in_a_segment_after_prepare_is_caught(
    bench: Bench, adopted: tuple[str, str], versions: tuple[Version, Version]
) -> None:
    raw = versions[1].tensor_bytes("model.layers.0.mlp.up_proj.weight")
    raw[1000] ^= 4
    try:
        bench.client.pause()
        (reply,) = bench.client.commit(adopted[1])
        assert reply["mismatched"] == ["model.layers.0.mlp.gate_up_proj.weight"]
        bench.client.fence("test")
    finally:
        raw[1000] ^= 4


def test_a_flipped_bit_is_caught_by_a_later_verification(
    bench: Bench, adopted: tuple[str, str]
) -> None:
    assert bench.client.job("verify", adopted[0], None)[0]["proved"] is True
    bench.fault(flip="lm_head.weight")
    (report,) = bench.client.job("verify", adopted[0], None, ticket="t7")
    assert report["proved"] is False
    assert report["mismatched"] == ["lm_head.weight"]
    assert report["ticket"] == "t7"
    assert bench.client.call("state")[0]["content_digest"] == ""


def test_commit_is_refused_while_generating(bench: Bench, adopted: tuple[str, str]) -> None:
    code = _code(lambda: bench.client.commit(adopted[1]))
    assert code == grpc.StatusCode.FAILED_PRECONDITION


def test_requests_wait_while_paused_and_go_on(bench: Bench) -> None:
    answers: list[Any] = []
    lease = bench.client.pause()
    asker = threading.Thread(target=lambda: answers.append(bench.vllm.complete(PROMPT)))
    asker.start()
    time.sleep(0.5)
    assert not answers
    held = bench.client.call("state")[0]["content_digest"]
    bench.client.resume(lease, 1, held)
    asker.join(30)
    assert len(answers) == 1


def test_fenced_engine_answers_503_with_the_reason(bench: Bench) -> None:
    bench.client.fence("rank 0 lost a page")
    status, answer = bench.vllm.request("/v1/completions", {"model": "model", "prompt": "x"})
    assert status == 503
    assert "rank 0 lost a page" in answer["error"]["message"]
    assert bench.vllm.request("/health")[0] == 200
    assert bench.client.health().reason == "rank 0 lost a page"


def test_a_fenced_engine_is_paused_once_more_to_compute_anew_what_it_kept(
    bench: Bench, adopted: tuple[str, str], versions: tuple[Version, Version]
) -> None:
    order = {"model": "model", "prompt": "One two", "max_tokens": 480, "ignore_eos": True}
    before = _preempted(bench)
    answers: list[Any] = []
    asker = threading.Thread(
        target=lambda: answers.append(bench.vllm.request("/v1/completions", order))
    )
    asker.start()
    _wait_for(lambda: bench.client.health().requests == 1)
    # Of one that still waits in vLLM's queue nothing is kept, so that nothing is computed anew.
    _wait_for(lambda: _counted(bench, "vllm:num_requests_running") == 1)
    bench.client.fence("it comes late")
    lease = bench.client.pause()
    assert bench.client.health().state == pb.BRIDGE_STATE_FENCED
    assert bench.client.health().requests == 1
    assert bench.client.commit(adopted[1])[0]["ok"]
    bench.client.resume(lease, 2, versions[1].content_digest)
    asker.join(60)
    assert [status for status, _ in answers] == [200]
    assert answers[0][1]["usage"]["completion_tokens"] == 480
    _wait_for(lambda: _preempted(bench) == before + 1)


def _preempted(bench: Bench) -> float:
    """Return how many requests vLLM has had to compute anew."""
    return _counted(bench, "vllm:num_preemptions_total")


def _counted(bench: Bench, metric: str) -> float:
    with bench.vllm.ask("/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metric))


def test_expired_lease_resumes_on_one_verified_version(bench: Bench) -> None:
    first = bench.vllm.complete(PROMPT)
    lease = bench.client.pause(lease_s=0.3)
    bench.client.renew(lease, 0.6)
    time.sleep(0.4)
    assert bench.client.health().state == pb.BRIDGE_STATE_PAUSED
    _wait_for(lambda: bench.client.health().state == pb.BRIDGE_STATE_SERVING)
    assert bench.vllm.complete(PROMPT) == first
    code = _code(lambda: bench.client.renew(lease, 1.0))
    assert code == grpc.StatusCode.FAILED_PRECONDITION


def test_expired_lease_fences_when_the_weights_are_not_whole(
    bench: Bench, adopted: tuple[str, str]
) -> None:
    bench.client.pause(lease_s=0.5)
    bench.fault(skip="model.norm.weight")
    bench.client.commit(adopted[1])
    _wait_for(lambda: bench.client.health().state == pb.BRIDGE_STATE_FENCED)
    assert "do not hold one proved version" in bench.client.health().reason


def test_lease_that_expires_during_a_commit_fences_until_the_ranks_answer(
    bench: Bench, adopted: tuple[str, str], versions: tuple[Version, Version]
) -> None:
    bench.client.pause(lease_s=0.3)
    bench.fault(stall=2.5)
    commit = threading.Thread(target=lambda: bench.client.commit(adopted[1]))
    commit.start()
    _wait_for(lambda: bench.client.health().state == pb.BRIDGE_STATE_FENCED)
    assert "had not returned" in bench.client.health().reason
    commit.join(20)
    # The commit came to its end and was proved, so the bridge may serve it.
    _wait_for(lambda: bench.client.health().state == pb.BRIDGE_STATE_SERVING)
    assert bench.client.call("state")[0]["content_digest"] == versions[1].content_digest


def test_one_lease_at_a_time(bench: Bench) -> None:
    lease = bench.client.pause()
    assert _code(bench.client.pause) == grpc.StatusCode.ABORTED
    bench.client.resume(lease, 1, bench.client.call("state")[0]["content_digest"])


def test_wait_gives_up_and_keeps_the_running_request(bench: Bench) -> None:
    order = {"model": "model", "prompt": "One two", "max_tokens": 480, "ignore_eos": True}
    answers: list[Any] = []
    asker = threading.Thread(
        target=lambda: answers.append(bench.vllm.request("/v1/completions", order))
    )
    asker.start()
    _wait_for(lambda: bench.client.health().requests == 1)
    lease = bench.client.pause(
        mode="wait", wait_timeout_s=0.1, after_wait="keep", clear_cache=False
    )
    assert bench.client.health().requests == 1
    bench.client.resume(lease, 1, bench.client.call("state")[0]["content_digest"])
    asker.join(60)
    status, answer = answers[0]
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 480


def test_release_forgets_and_unmaps(
    bench: Bench, adopted: tuple[str, str], checkpoint: Callable[..., Path]
) -> None:
    third = bench.staging.stage(checkpoint(seed=3, layers=LAYERS))
    name, _ = bench.client.prepare(third)
    before = bench.client.call("state")[0]
    assert name in before["prepared"]
    (reply,) = bench.client.call("release", keep=list(adopted))
    assert name not in reply["prepared"]
    assert reply["segments"] == before["segments"]
    kept = [s for v in bench.staging.versions[:2] for s in v.staged.segments]
    (reply,) = bench.client.call("release", keep=list(adopted), segments=kept)
    assert reply["segments"] == len(kept)


def test_last_a_killed_worker_is_told_and_nothing_is_served(bench: Bench) -> None:
    os.kill(bench.client.call("hello")[0]["pid"], signal.SIGKILL)
    # vLLM finds out by itself within seconds and ends its API server; until then calls are refused.
    code = _code(lambda: bench.client.call("state"))
    assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    _wait_for(lambda: _gone_or_dead(bench), 60)
    assert not bench.vllm.answers()


def _gone_or_dead(bench: Bench) -> bool:
    try:
        health = bench.client.health()
    except grpc.RpcError:
        return True
    return health.state in (pb.BRIDGE_STATE_DEAD, pb.BRIDGE_STATE_FENCED)
