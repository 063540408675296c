"""What loaders hold beside a real vLLM: two arenas where they have room, nothing while it sleeps.

vLLM's sleep mode takes no memory away on a CPU, but goes through all that it does elsewhere: the
calls of its API, the guard, the engine core and the workers.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from safetensors.torch import load_file, save_file

from tests.support.faulty_site import FaultySite, running_site
from tests.support.loader_processes import loaders_of, wait_for_loaders, wait_gone
from tests.support.stock import push_folder
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

pytestmark = [
    pytest.mark.vllm,
    # A minute and a half; `make test` has the loader of a vLLM that stays awake.
    pytest.mark.battery,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("whole"),
]

_PACKED = {"WEIGHTSYNC_CPU_PLAIN_WEIGHTS": "linear"}
#: Room for two arenas and a load, and vLLM's calls of sleep mode.
_VARIABLES = {**_PACKED, "WEIGHTSYNC_DEVICE_ROOM": "1GiB", "VLLM_SERVER_DEV_MODE": "1"}
#: How long vLLM may take to sleep or to wake up, and a loader to start, seconds.
_CHANGE_S, _START_S = 20.0, 60.0


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.battery)], ids="tp{}".format
)
def site(request: pytest.FixtureRequest) -> Iterator[FaultySite]:
    # With two slots the bytes of what was live before are not there for its lease.
    options = {"arch": "qwen3_moe", "slots": 3, "variables": _VARIABLES}
    with running_site(request.param, **options) as site:
        yield site


def _model(site: FaultySite) -> pb.ModelStatus:
    (model,) = site.server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models
    return model


def _until_loaded(site: FaultySite, version: int = 0) -> None:
    end = time.monotonic() + _START_S
    while True:
        loaders = [rank.loader for rank in _model(site).engine.ranks]
        if all(
            loader.state == pb.LOADER_STATE_READY and loader.version >= version
            for loader in loaders
        ):
            return
        assert time.monotonic() < end, loaders
        time.sleep(0.05)


def _sleep(site: FaultySite) -> None:
    assert site.vllm.request("/sleep?level=1&mode=abort", {}, _CHANGE_S)[0] == 200


def _wake_up(site: FaultySite) -> None:
    assert site.vllm.request("/wake_up", {}, _CHANGE_S)[0] == 200


def _loading(site: FaultySite) -> tuple[int, str]:
    """Return a version that is being loaded, and will be for long, and its name."""
    _, near, _ = _three(site)
    # Two arenas and the model hold all of them by now.
    _sleep(site)
    _wake_up(site)
    site.arm("loader.load=1*sleep(60)")
    version = site.push(near)
    assert site.met(_START_S)
    return version, near


def _three(site: FaultySite) -> tuple[str, str, str]:
    """Return what is live, and the two other checkpoints."""
    live = site.ask()
    first, second = (name for name in "abc" if name != live)
    return live, first, second


def test_a_vllm_that_sleeps_has_no_loader_and_gets_it_back(site: FaultySite) -> None:
    _, near, far = _three(site)
    site.apply(site.push(near))
    version = site.push(far)
    _until_loaded(site, version)
    loaders = loaders_of(site.vllm)
    assert loaders
    _sleep(site)
    wait_gone(loaders, 1.0)
    refusal = site.try_apply(version)
    assert refusal is not None
    assert refusal.reason is Reason.ENGINE_ASLEEP
    end = time.monotonic() + 5
    while any(rank.HasField("loader") for rank in _model(site).engine.ranks):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert not _model(site).rollback_resident
    _wake_up(site)
    assert site.ask() == near
    wait_for_loaders(site.vllm, len(loaders))
    _until_loaded(site, version)
    assert {rank.loader.restarts for rank in _model(site).engine.ranks} == {0}
    with site.watched():
        site.apply(version)
        assert site.ask() == far
    assert set(site.served) <= {near, far}


def _memory_files(pid: int, kind: str) -> set[str]:
    """Return the inodes of the memory that a process maps (`maps`) or has open (`fd`)."""
    if kind == "maps":
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "/memfd:" in line}
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # One that is closed meanwhile is none.
        with contextlib.suppress(FileNotFoundError):
            if "/memfd:" in str(link.readlink()):
                found.add(str(link.stat().st_ino))
    return found


def test_a_loader_maps_a_slot_once_and_lets_go_of_what_is_gone(site: FaultySite) -> None:
    _, near, far = _three(site)
    site.apply(site.push(near))
    _sleep(site)
    _wake_up(site)
    site.apply(site.push(far))
    _until_loaded(site)
    assert site.server.process is not None
    server = site.server.process.pid
    slots = [
        _memory_files(loader.pid, "maps") & _memory_files(server, "fd")
        for loader in loaders_of(site.vllm)
    ]
    assert all(slots), "it stays mapped after the load"
    # Files of other sizes: what lay in the slots is gone.
    whole: dict[str, torch.Tensor] = {}
    for file in sorted(site.folders[near].glob("*.safetensors")):
        whole |= load_file(file)
    other = site.root / "whole"
    other.mkdir()
    save_file(whole, other / "model.safetensors", metadata={"format": "pt"})
    for _ in range(3):
        version = push_folder(site.server.stub, other).version
        site.content[version] = near
        site.apply(version)
        site.apply(site.push(far))
    end = time.monotonic() + _CHANGE_S
    while True:
        existing = _memory_files(server, "fd")
        left = [
            (before & _memory_files(loader.pid, "maps")) - existing
            for before, loader in zip(slots, loaders_of(site.vllm), strict=True)
        ]
        if not any(left) and all(before - existing for before in slots):
            break
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_sleep_ends_a_load_that_is_made_again_after_it(site: FaultySite) -> None:
    version, near = _loading(site)
    loaders = loaders_of(site.vllm)
    _sleep(site)
    wait_gone(loaders, 1.0)
    site.disarm()
    _wake_up(site)
    _until_loaded(site, version)
    site.apply(version)
    assert site.ask() == near


def test_an_apply_that_waits_for_a_load_is_told_that_vllm_sleeps(site: FaultySite) -> None:
    version, near = _loading(site)
    request = pb.ApplyVersionRequest(model="default", version=version)
    waiting = site.server.stub.ApplyVersion.future(request, timeout=60)
    time.sleep(0.5)
    _sleep(site)
    site.disarm()
    with pytest.raises(grpc.RpcError) as caught:
        waiting.result()
    _wake_up(site)
    told = from_call(caught.value)
    assert told is not None
    assert told.reason is Reason.ENGINE_ASLEEP, told
    site.apply(version)
    assert site.ask() == near


# Last: what is rolled back is not loaded again by itself.


def test_with_room_for_two_arenas_the_way_back_outlives_the_next_load(site: FaultySite) -> None:
    old, near, far = _three(site)
    site.apply(site.push(near))
    _until_loaded(site, site.push(far))
    # What is loaded for the next apply has not taken the place of what was live before.
    model = _model(site)
    assert model.rollback_resident
    arenas = {rank.loader.arena_bytes for rank in model.engine.ranks}
    loaders = loaders_of(site.vllm)
    for loader in loaders:
        loader.suspend()
    try:
        with site.watched():
            site.until_served(near)
            site.server.stub.Rollback(pb.RollbackRequest(model="default"), timeout=60)
            assert site.ask() == old
            site.until_served(old)
        assert set(site.served) == {near, old}
    finally:
        for loader in loaders:
            loader.resume()
    site.apply(site.push(far))
    assert {rank.loader.arena_bytes for rank in _model(site).engine.ranks} == arenas
