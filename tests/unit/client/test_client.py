from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import save_file

import weightsync_client
from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import (
    Access,
    ApplyOutcome,
    AsyncClient,
    CacheMode,
    Client,
    DeadlineError,
    Durability,
    EngineOrder,
    EngineReport,
    InvalidError,
    NotFoundError,
    PauseMode,
    Reason,
    Serving,
    Timeouts,
    UnavailableError,
)
from weightsync_client.rpc.channels import Link
from weightsync_client.source.shards import file_shard
from weightsync_client.source.source import make_source
from weightsync_client.source.tensors import Scratch

PUBLIC = [
    "AbortedError",
    "Access",
    "ApplyKind",
    "ApplyOptions",
    "ApplyOutcome",
    "ApplyPlan",
    "ApplyRecord",
    "ApplyReport",
    "ApplyResult",
    "ApplyStrategy",
    "AsyncClient",
    "AsyncPushHandle",
    "CacheMode",
    "CheckpointResult",
    "Client",
    "ClientError",
    "DataError",
    "DeadlineError",
    "Declared",
    "DeniedError",
    "DiskStatus",
    "Durability",
    "EngineChoices",
    "EngineOrder",
    "EngineProof",
    "EngineReport",
    "EngineState",
    "EngineStatus",
    "ExhaustedError",
    "Fallback",
    "FleetApplyOptions",
    "FleetChoices",
    "FleetMemberReport",
    "FleetMemberStatus",
    "FleetOrder",
    "FleetReport",
    "FleetStatus",
    "Gate",
    "GateAction",
    "GateOutcome",
    "GateReport",
    "GateWhen",
    "InvalidError",
    "LayoutCheck",
    "LiveCheck",
    "LoaderState",
    "LoaderStatus",
    "ModelStatus",
    "NotFoundError",
    "PauseChoices",
    "PauseMode",
    "PauseUsed",
    "Phases",
    "Probes",
    "Progress",
    "PullResult",
    "PulledTensor",
    "PushHandle",
    "PushKind",
    "PushOptions",
    "PushResult",
    "PushSource",
    "PushStatus",
    "RankResult",
    "Reason",
    "RefusedError",
    "Residency",
    "Retry",
    "RollbackOptions",
    "RollbackReport",
    "RunningApply",
    "RunningPhase",
    "Serving",
    "ShardedTensor",
    "SlotStatus",
    "SlowestRank",
    "Spans",
    "Status",
    "Streamed",
    "TensorInfo",
    "Timeouts",
    "TokenSpans",
    "TrainEvent",
    "TrainProgress",
    "TrainStatus",
    "Trainer",
    "TrainerState",
    "TransferPath",
    "Transform",
    "UnavailableError",
    "Verification",
    "Version",
    "VersionChange",
    "VersionSpan",
    "Way",
    "WeightSyncError",
    "versions_of",
]


def test_public_names_are_frozen() -> None:
    assert weightsync_client.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(weightsync_client, name) is not None


def test_import_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, weightsync_client, weightsync_client.cli; "
        "print([m for m in ('torch', 'vllm', 'numpy', 'safetensors', 'weightsync_server') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def arrays(seed: int, count: int = 5) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {f"t{i}": rng.standard_normal(1000).astype(np.float32) for i in range(count)}


# Calls.


def test_apply_says_what_was_asked_and_reads_the_report(client: Client, servicer: Any) -> None:
    client.push(arrays(0))
    client.push(arrays(1))
    report = client.apply(
        2, pause="wait", cache=CacheMode.KEEP, wait_timeout_s=1.5, after_wait="abort",
        require_durable=False, clear_rejected=True, prepare_timeout_s=7, idempotency_key="k",
    )  # fmt: skip
    request = servicer.requests[-1]
    assert (request.model, request.version, request.idempotency_key) == ("policy", 2, "k")
    assert request.pause.mode == pb.PAUSE_MODE_WAIT
    assert request.pause.cache == pb.CACHE_MODE_KEEP
    assert request.pause.wait_timeout.ToMilliseconds() == 1500
    assert request.pause.after_wait == pb.PAUSE_MODE_ABORT
    assert (request.require_durable, request.clear_rejected) == (False, True)
    assert request.prepare_timeout.seconds == 7
    assert report.outcome is ApplyOutcome.APPLIED
    assert report.phases.paused_total_s == 0.0125
    assert report.pause.mode is PauseMode.WAIT
    assert report.ranks[0].rank == "0/0/0"
    assert report.plan is None


def test_apply_leaves_defaults_to_the_server(client: Client, servicer: Any) -> None:
    client.push(arrays(0))
    client.apply()
    request = servicer.requests[-1]
    assert request.version == 0
    assert not request.HasField("require_durable")
    assert request.pause == pb.PauseOptions()
    assert len(request.idempotency_key) == 32
    assert client.apply(dry_run=True).plan.write_bytes == 42  # type: ignore[union-attr]


def test_no_pause_is_asked_for_by_its_name(client: Client, servicer: Any) -> None:
    client.push(arrays(0))
    client.apply(pause="between_steps")
    # Nothing about caches: there is one way only.
    wanted = pb.PauseOptions(mode=pb.PAUSE_MODE_BETWEEN_STEPS)
    assert servicer.requests[-1].pause == wanted


@pytest.mark.parametrize(
    "options", [{"pause": "stop"}, {"cache": "unspecified"}, {"after_wait": "wait a bit"}]
)
def test_unknown_modes_are_refused_here(client: Client, options: Any) -> None:
    with pytest.raises(InvalidError, match=r"use one of (keep, wait, abort|recompute, keep)"):
        client.apply(1, **options)


async def test_applies_and_proofs_name_engines_and_their_order(
    client: Client, running: Any, servicer: Any
) -> None:
    client.push(arrays(0))
    client.push(arrays(1))
    client.apply(1)
    request = servicer.requests[-1]
    assert (request.engine, request.order, request.max_unavailable) == ("", 0, 0), "the server's"
    ask: dict[str, Any] = {"engine": "e1", "order": EngineOrder.ROLLING, "max_unavailable": 3}
    client.apply(2, **ask)
    client.rollback(**ask)
    async with AsyncClient(running.address) as aio:
        await aio.apply(2, **ask)
        await aio.rollback(**ask | {"order": "together"})
        await aio.verify(engine="e1")
    client.verify(1, engine="e2")
    named = [one for one in servicer.requests if getattr(one, "engine", "")]
    applies, proofs = named[:4], named[4:]
    assert [one.engine for one in (*applies, *proofs)] == ["e1"] * 5 + ["e2"]
    assert [one.max_unavailable for one in applies] == [3] * 4
    rolling, together = pb.ENGINE_ORDER_ROLLING, pb.ENGINE_ORDER_TOGETHER
    assert [one.order for one in applies] == [rolling, rolling, rolling, together]
    # More than a message can carry, and more than any host has.
    client.apply(2, order="rolling", max_unavailable=2**40)
    assert servicer.requests[-1].max_unavailable == 2**32 - 1


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"order": "first"}, "order is 'first'; use one of together, rolling"),
        ({"engine": 3}, "engine is 3; use a string"),
        ({"max_unavailable": -1}, "max_unavailable is -1; use a whole number"),
    ],
)
def test_engines_that_cannot_be_meant_are_refused(
    client: Client, servicer: Any, options: dict[str, Any], wrong: str
) -> None:
    for call in (client.apply, client.rollback):
        with pytest.raises(InvalidError, match=wrong):
            call(**options)
    assert not {"ApplyVersion", "Rollback"} & set(servicer.calls)


def test_reports_tell_of_each_engine(client: Client, servicer: Any) -> None:
    client.push(arrays(0))
    servicer.engines = [
        pb.EngineReport(engine="e0", report=pb.ApplyReport(version=1, written_bytes=5)),
        pb.EngineReport(engine="e1", absent="it does not answer"),
    ]
    report = client.apply()
    assert report.engines == client.rollback().report.engines
    first, second = report.engines
    assert first.report is not None
    assert (first.engine, first.report.version, first.report.written_bytes) == ("e0", 1, 5)
    assert second == EngineReport("e1", None, "it does not answer")


def test_rollback_verify_pin_delete_epoch_abort(client: Client, servicer: Any) -> None:
    client.push(arrays(0))
    client.push(arrays(1))
    client.apply(2)
    assert client.verify().verified
    assert not client.verify(1).verified
    result = client.rollback("looks wrong", pause="abort")
    assert (result.rejected_version, result.report.version) == (2, 1)
    assert servicer.requests[-1].reason == "looks wrong"
    assert client.pin(1).pinned
    assert not client.pin(1, pinned=False).pinned
    client.delete(2, force=True)
    assert servicer.requests[-1].force
    with pytest.raises(NotFoundError):
        client.get_version(2)
    assert client.acquire_epoch() == 1
    assert servicer.requests[-1].holder.endswith(f":{os.getpid()}")
    assert client.acquire_epoch("me") == 2
    client.abort("push-7")
    assert servicer.requests[-1].push_id == "push-7"


def test_versions_follow_pages(client: Client, servicer: Any) -> None:
    for seed in range(5):
        client.push(arrays(seed), metadata={"step": str(seed)})
    client.apply(3)
    versions = client.versions()
    assert [v.version for v in versions] == [5, 4, 3, 2, 1]
    assert servicer.calls.count("ListVersions") == 3
    assert versions[0].metadata == {"step": "4"}
    assert versions[2].serving is Serving.LIVE
    assert versions[0].durability is Durability.COMMITTED
    assert versions[0].commit_time == dt.datetime(2025, 6, 15, 15, 6, 40, tzinfo=dt.UTC)
    assert client.get_version().version == 3


def test_applies_follow_pages(client: Client, servicer: Any) -> None:
    servicer.applies = [pb.ApplyRecord(number=n, version=n % 2) for n in range(1, 6)]
    assert [one.number for one in client.applies(0)] == [5, 4, 3, 2, 1]
    assert servicer.calls.count("ListApplies") == 3
    assert [one.number for one in client.applies(3)] == [5, 4, 3]
    assert [one.page_size for one in servicer.requests[-2:]] == [3, 1]
    assert [one.number for one in client.applies(version=1)] == [5, 3, 1]
    assert client.applies()[0].time is None
    with pytest.raises(InvalidError, match="last"):
        client.applies(-1)


def test_status(client: Client) -> None:
    status = client.status()
    assert status.models[0].engine.state == "serving"
    assert status.models[0].slots[0].state == "free"
    assert status.start_time is None


def test_values_of_a_newer_server_are_unspecified(client: Client, servicer: Any) -> None:
    client.push(arrays(0))
    info = servicer._info

    def newer(upload: Any) -> Any:
        message = info(upload)
        message.serving = 77
        return message

    servicer._info = newer
    assert client.versions()[0].serving is Serving.UNSPECIFIED


# Model, token, retries, timeouts.


def test_the_model_is_asked_for_once(client: Client, servicer: Any) -> None:
    client.versions()
    client.versions()
    assert servicer.calls == ["GetStatus", "ListVersions", "ListVersions"]


def test_a_server_with_two_models_wants_a_name(running: Any, servicer: Any) -> None:
    servicer.models = ["actor", "critic"]
    with Client(running.address) as client, pytest.raises(InvalidError, match="actor, critic"):
        client.versions()
    with Client(running.address, model="critic") as client:
        assert client.versions() == []
    with Client(running.address, model="other") as client, pytest.raises(NotFoundError) as caught:
        client.versions()
    assert caught.value.reason is Reason.MODEL_UNKNOWN


def test_the_token_goes_with_every_call_and_is_not_shown(running: Any, servicer: Any) -> None:
    with Client(running.address, access=Access(token="s3cret")) as client:
        client.push(arrays(0))
        list(client.tensors(1))
    assert {m.get("authorization") for m in servicer.metadata} == {"Bearer s3cret"}
    assert "s3cret" not in repr(Link("localhost:1", Access(token="s3cret")))


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_unary_calls_are_tried_again(
    client: Client, servicer: Any, status_error: Any, code: grpc.StatusCode
) -> None:
    failures = [1, 2]

    def refuse(method: str, _request: Any) -> None:
        if method == "ListVersions" and failures:
            failures.pop()
            raise status_error(code, "connection reset")

    servicer.before = refuse
    assert client.versions() == []
    assert servicer.calls.count("ListVersions") == 3


def test_refusals_are_not_tried_again(client: Client, servicer: Any) -> None:
    def refuse(method: str, _request: Any) -> None:
        if method == "ApplyVersion":
            raise WeightSyncError(
                Reason.ENGINE_FENCED, "the engine is fenced; roll back", metadata={"rank": "0/0/1"}
            )

    servicer.before = refuse
    with pytest.raises(weightsync_client.RefusedError) as caught:
        client.apply(1)
    assert caught.value.metadata == {"rank": "0/0/1"}
    assert caught.value.__cause__ is None
    assert servicer.calls.count("ApplyVersion") == 1


def test_timeouts_end_calls(running: Any, servicer: Any) -> None:
    over = threading.Event()
    servicer.before = lambda method, _request: over.wait(50) if method == "GetStatus" else None
    with Client(running.address, timeouts=Timeouts(call_s=0.2)) as client:
        try:
            with pytest.raises(DeadlineError, match="the query for the status on 127"):
                client.status()
        finally:
            over.set()


def test_no_server(tmp_path: Path) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        client.push(arrays(0))
    with pytest.raises(InvalidError, match="address is empty"):
        Client("")


def test_unix_socket(start_server: Any, servicer: Any, tmp_path: Path) -> None:
    server = start_server(servicer, f"unix:{tmp_path}/s.sock")
    with Client(f"unix:{tmp_path}/s.sock") as client:
        assert client.push(arrays(0)).version == 1
    server.stop()


def test_a_closed_client_says_so(running: Any) -> None:
    client = Client(running.address)
    client.close()
    with pytest.raises(InvalidError, match="was closed"):
        client.status()


# Sources that are wrong.


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (7, "type int cannot be pushed"),
        ({}, "holds no tensor"),
        (iter([]), "gave no tensor"),
        (iter([("a", np.zeros(1)), ("a", np.zeros(1))]), "'a' twice"),
        (iter([np.zeros(1)]), "pairs of a name and a tensor"),
        ({"a\u202eb": np.zeros(1)}, "not printable"),
        ({3: np.zeros(1)}, "name of a tensor is 3; use a string"),
        ("/nowhere/x.safetensors", "cannot be read: No such file"),
    ],
)
def test_bad_sources(client: Client, source: Any, sentence: str) -> None:
    with pytest.raises(weightsync_client.ClientError, match=sentence):
        client.push(source)


def test_what_has_a_state_dict_and_is_no_module_is_told_to_give_it(client: Client) -> None:
    import torch

    model = torch.nn.Linear(1, 1)
    with pytest.raises(InvalidError, match=r"push its state_dict\(\)"):
        client.push(torch.optim.SGD(model.parameters()))  # type: ignore[arg-type] # the mistake


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "not a safetensors file"),
        (b"\x08\0\0\0\0\0\0\0{}", "not a safetensors file"),
        (b"\xff" * 16, "not a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "does not begin with"),
        (b"\x08\0\0\0\0\0\0\0{}      \x00", "fill 0 bytes"),
    ],
)
def test_bad_files(tmp_path: Path, data: bytes, sentence: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(InvalidError, match=sentence):
        file_shard(tmp_path / "x.safetensors", 0)


def test_a_file_that_was_cut_is_to_be_copied_again(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": np.zeros(100)}, path)
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 800, 20):
        path.write_bytes(whole[:cut])
        with pytest.raises(InvalidError, match=r"was cut.*copy it again") as caught:
            file_shard(path, 0)
        assert caught.value.reason is Reason.SHARD_INVALID


def test_a_folder_with_the_same_tensor_twice_is_refused(client: Client, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": np.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        InvalidError, match=r'"w" is in the version twice, in "a.safetensors" and in "b.saf'
    ):
        client.push(tmp_path)


@pytest.mark.parametrize("partial", [True, False])
def test_a_tensor_that_the_index_tells_and_its_file_lacks_is_refused(
    client: Client, servicer: Any, tmp_path: Path, *, partial: bool
) -> None:
    for name in ("a", "b"):
        save_file({name: np.zeros(1)}, tmp_path / f"{name}.safetensors")
    weight_map = {"a": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidError, match=r'json places "c" in "b.saf.*", which does not hold it'):
        client.push(tmp_path, partial=partial)
    assert not servicer.uploads


def test_the_index_settles_a_stale_copy(client: Client, servicer: Any, tmp_path: Path) -> None:
    save_file({"w": np.full(2, 1.0)}, tmp_path / "a.safetensors")
    save_file({"v": np.full(2, 2.0), "w": np.full(2, 9.0)}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for holder, wanted in (("a", 1.0), ("b", 9.0)):
        index.write_text(
            json.dumps({"weight_map": {"w": f"{holder}.safetensors", "v": "b.safetensors"}})
        )
        source = make_source(tmp_path, 1 << 20)
        found = {t.name: np.frombuffer(t.reader(Scratch())(0, t.size)) for t in source.tensors}
        assert found["w"].tolist() == [wanted] * 2
        assert found["v"].tolist() == [2.0] * 2
        client.push(tmp_path)
    assert servicer.uploads


def test_the_index_tells_which_files_belong_together(
    client: Client, servicer: Any, tmp_path: Path
) -> None:
    for name in ("a", "consolidated"):
        save_file({"w": np.zeros(1)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "a.safetensors"}}')
    client.push(tmp_path)
    assert servicer.uploads["push-0"].shards[0].entry.name == "a.safetensors"
    for bad in ('{"weight_map": {"w": "../a.safetensors"}}', "[]", "{"):
        index.write_text(bad)
        with pytest.raises(InvalidError, match="is not an index"):
            client.push(tmp_path)


def test_a_file_that_shrinks_is_told(client: Client, servicer: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": np.zeros(1_000_000)}, path)

    def shrink(method: str, _request: Any) -> None:
        if method == "BeginPush":
            os.truncate(path, 5_000_000)

    servicer.before = shrink
    with pytest.raises(InvalidError, match="became shorter than"):
        client.push(path)
    assert servicer.uploads["push-0"].aborted
