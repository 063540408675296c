"""Faults of the loaders beside a real vLLM whose versions no load plan makes.

The experts of the model are packed for the processor, so that every version is loaded beside
generation. While loaders, ranks and the server fail, vLLM is asked without a break: every answer
must be a whole version's.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.support.faulty_site import FaultySite, running_site
from tests.support.loader_processes import loaders_of, wait_gone
from tests.support.models import make_checkpoint
from tests.support.processes import names, state
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call
from weightsync_client import Client, ClientError, PushKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("whole"),
]

#: How long a rank that died may have a loader, seconds. One that is killed gives its memory back at
#: its own priority, nice(2), while engines of other modules start.
_ORPHAN_S = 30.0


_SIZES = [
    pytest.param({}, id="tp1"),
    pytest.param({"tp": 2}, id="tp2", marks=pytest.mark.battery),
    pytest.param({"pp": 2}, id="pp2", marks=pytest.mark.battery),
]


@pytest.fixture(scope="module", params=_SIZES)
def site(request: pytest.FixtureRequest) -> Iterator[FaultySite]:
    packed = {"WEIGHTSYNC_CPU_PLAIN_WEIGHTS": "linear"}
    with running_site(arch="qwen3_moe", variables=packed, **request.param) as site:
        yield site


def _unloaded(site: FaultySite) -> str:
    """Return a checkpoint that is neither live nor lies beside what is."""
    live = site.ask()
    near, far = (name for name in "abc" if name != live)
    site.apply(site.push(near))
    return far


def _ranks(site: FaultySite) -> list[pb.RankResult]:
    (model,) = site.server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models
    return list(model.engine.ranks)


def _threads(process: psutil.Process) -> int:
    try:
        return len(names(Path(f"/proc/{process.pid}/task")))
    except FileNotFoundError:
        return 0


def _kill(loaders: list[psutil.Process]) -> None:
    for loader in loaders:
        loader.kill()
    end = time.monotonic() + 10
    # Their ranks look at them when they are asked to load. One is not dead for its rank before the
    # last of its threads is.
    while any(state(loader.pid) not in ("", "Z") or _threads(loader) > 1 for loader in loaders):
        assert time.monotonic() < end
        time.sleep(0.01)


def _applied_under(site: FaultySite, plan: str, name: str) -> tuple[int, WeightSyncError | None]:
    """Push and apply a checkpoint while things fail; return the version and the refusal."""
    site.arm(plan)
    version = site.push(name)
    refusal = site.try_apply(version)
    assert site.met(), f"the fault was never met: {refusal}"
    site.disarm()
    return version, refusal


def _altered(site: FaultySite, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Return a copy of a checkpoint in one file, with other tensors."""
    folder = site.root / "altered"
    folder.mkdir(exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(site.folders["a"].glob("*.safetensors")):
        tensors |= load_file(file)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_version_is_loaded_beside_generation_and_its_way_back_needs_no_load(
    site: FaultySite,
) -> None:
    old, new = site.ask(), _unloaded(site)
    near = site.ask()
    assert near != old
    with site.watched():
        report = site.apply(site.push(new))
        assert report.strategy == pb.APPLY_STRATEGY_TWIN
        assert site.ask() == new
        site.until_served(new)
        for rank in _ranks(site):
            assert rank.transform == pb.TRANSFORM_TWIN
            assert rank.loader.state == pb.LOADER_STATE_READY
            assert rank.loader.arena_bytes > 0
        # A loader that stands still could load nothing.
        loaders = loaders_of(site.vllm)
        for loader in loaders:
            loader.suspend()
        try:
            back = site.server.stub.Rollback(pb.RollbackRequest(model="default"), timeout=60)
        finally:
            for loader in loaders:
                loader.resume()
        assert back.report.strategy == pb.APPLY_STRATEGY_TWIN
        assert site.ask() == near
        site.until_served(near)
    assert set(site.served) == {near, new}


@pytest.mark.parametrize("point", ["worker.commit", "worker.half", "worker.written"])
def test_a_rank_that_fails_in_its_commit_is_restored(site: FaultySite, point: str) -> None:
    old, version = site.ask(), site.push()
    with site.watched():
        site.arm(f"{point}=1*error(ENOMEM)")
        refusal = site.try_apply(version)
        assert site.met()
        site.recover()
    assert refusal is not None
    assert refusal.reason is Reason.APPLY_RESTORED
    assert "Cannot allocate memory" in refusal.message
    assert site.ask() == old
    assert set(site.served) == {old}


@pytest.mark.parametrize(
    ("point", "told"),
    [
        ("loader.start=panic", "ended with status -9"),
        pytest.param("loader.load=panic", "ended with status -9", marks=pytest.mark.battery),
        pytest.param("loader.loaded=panic", "ended with status -9", marks=pytest.mark.battery),
        ("loader.stored=panic", "ended with status -9"),
        pytest.param(
            "loader.load=error(ENOMEM)", "Cannot allocate memory", marks=pytest.mark.battery
        ),
        ("loader.stored=error(ENOMEM)", "Cannot allocate memory"),
    ],
)
def test_a_loader_that_fails_is_replaced(site: FaultySite, point: str, told: str) -> None:
    name = _unloaded(site)
    old = site.ask()
    before = [loader.pid for loader in loaders_of(site.vllm)]
    with site.watched():
        if point.startswith("loader.start"):
            _kill(loaders_of(site.vllm))
        version, refusal = _applied_under(site, point, name)
        assert refusal is not None
        assert refusal.reason is Reason.ENGINE_AWAY
        assert told in refusal.message
        assert site.recover() == old
        assert site.apply(version, 120).strategy == pb.APPLY_STRATEGY_TWIN
        assert site.ask() == name
    assert "503" not in site.served
    after = [loader.pid for loader in loaders_of(site.vllm)]
    assert len(after) == len(before)
    assert not set(after) & set(before)
    assert all(rank.loader.restarts for rank in _ranks(site))


def test_a_frozen_loader_is_waited_for_no_longer_than_asked(site: FaultySite) -> None:
    name = _unloaded(site)
    old = site.ask()
    with site.watched():
        site.arm("loader.load=1*stop")
        version = site.push(name)
        assert site.met(20)
        request = pb.ApplyVersionRequest(model="default", version=version)
        request.prepare_timeout.FromSeconds(2)
        begin = time.monotonic()
        with pytest.raises(grpc.RpcError) as error:
            site.server.stub.ApplyVersion(request, timeout=60)
        refusal = from_call(error.value)
        assert refusal is not None
        assert time.monotonic() - begin < 5
        assert refusal.reason is Reason.DEADLINE_EXCEEDED
        assert "rank 0/0/0" in refusal.message
        assert " %" in refusal.message
        assert site.ask() == old
        site.let_go_on()
        site.disarm()
        site.recover()
        site.apply(version, 120)
        assert site.ask() == name


def test_a_loader_that_lies_is_not_believed(site: FaultySite) -> None:
    name = _unloaded(site)
    old = site.ask()
    with site.watched():
        version, refusal = _applied_under(site, "loader.digests=1*lie(x)", name)
        assert refusal is not None
        assert refusal.reason is Reason.APPLY_RESTORED
        assert site.recover() == old
    assert set(site.served) == {old}
    # What it told is not taken for another try either.
    again = pb.ApplyVersionRequest(model="default", version=version, clear_rejected=True)
    site.server.stub.ApplyVersion(again, timeout=120)
    assert site.ask() == name


def test_a_server_that_dies_in_the_middle_of_a_load(site: FaultySite) -> None:
    name = _unloaded(site)
    old = site.ask()
    with site.watched():
        site.arm("loader.load=1*sleep(3)")
        version = site.push(name)
        assert site.met(20)
        site.restart_server()
        assert site.recover() == old
        site.apply(version, 120)
        assert site.ask() == name
    assert "503" not in site.served


@pytest.mark.parametrize("point", ["apply.commit", "apply.committed"])
def test_a_server_that_dies_in_an_apply_leaves_one_whole_version(
    site: FaultySite, point: str
) -> None:
    old, version = site.ask(), site.push()
    new = site.content[version]
    with site.watched():
        site.arm(f"{point}=1*panic")
        refusal = site.try_apply(version)
        assert refusal is not None
        assert refusal.reason is Reason.SERVER_AWAY
        site.restart_server()
        assert site.recover() in (old, new)
    assert set(site.served) <= {old, new, "503"}


def _lose(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.experts.3.down_proj.weight"]


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    tensors[name] = tensors[name][:-1].clone()


def _widen(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    tensors[name] = tensors[name].float()


@pytest.mark.parametrize("change", [_lose, _cut, _widen])
def test_a_version_of_another_layout_is_refused_by_name(
    site: FaultySite, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    old = site.ask()
    with site.watched(), Client(site.server.address) as client:
        with pytest.raises(ClientError) as refused:
            client.apply(client.push(str(_altered(site, change)), dtype="keep").version)
        assert refused.value.reason is Reason.ENGINE_REFUSED
        assert "experts.3.down_proj.weight" in str(refused.value)
        assert site.recover() == old
    assert set(site.served) == {old}


def test_a_delta_is_loaded_as_any_version(site: FaultySite) -> None:
    name = site.beside("b")
    other = "b" if name == "c" else "c"
    with Client(site.server.address) as client, site.watched():
        client.hold(str(site.folders[other]))
        pushed = client.push(str(site.folders[name]))
        assert pushed.kind is PushKind.DELTA
        site.content[pushed.version] = name
        assert site.apply(pushed.version).strategy == pb.APPLY_STRATEGY_TWIN
        assert site.ask() == name


@pytest.mark.battery
def test_a_version_that_fails_three_times_is_refused_and_others_load(site: FaultySite) -> None:
    folder = make_checkpoint(site.root / "d", "qwen3_moe", dtype="bfloat16", seed=7)
    site.folders["d"] = folder
    name = _unloaded(site)
    site.arm("loader.load=panic")
    version = site.push("d")
    refusals = [site.try_apply(version, 120) for _ in range(4)]
    site.disarm()
    last = refusals[-1]
    assert last is not None
    assert last.reason is Reason.ENGINE_REFUSED
    assert "could not be loaded 3 times" in last.message
    site.apply(site.push(name), 120)
    assert site.ask() == name


def test_a_loader_dies_with_its_rank_and_a_new_vllm_gets_the_live_version(
    site: FaultySite,
) -> None:
    site.apply(site.push(_unloaded(site)))
    live, loaders = site.ask(), loaders_of(site.vllm)
    assert loaders
    for rank in {loader.ppid() for loader in loaders}:
        os.kill(rank, signal.SIGKILL)
    wait_gone(loaders, _ORPHAN_S)
    site.vllm.stop()
    site.vllm.start()
    assert site.recover() == live
    assert _ranks(site)[0].transform == pb.TRANSFORM_TWIN


@pytest.mark.battery
def test_a_vllm_that_ends_leaves_no_loader(site: FaultySite) -> None:
    live, loaders = site.ask(), loaders_of(site.vllm)
    assert site.vllm.process is not None
    # Not its group: what it started is its own to end.
    site.vllm.process.terminate()
    site.vllm.process.wait(60)
    wait_gone(loaders, _ORPHAN_S)
    assert site.recover() == live
