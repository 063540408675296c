"""The checkpoint engine as verl calls it, against a real gRPC server.

To be imported, verl needs Ray and much else. So the classes and functions that call the engine are
compiled out of verl's own files, unchanged but for decorators of Ray; a rank is a thread with an
event loop of its own, as an actor of Ray is a process with one.
"""

from __future__ import annotations
import __future__

import ast
import asyncio
import importlib
import inspect
import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch
from safetensors.torch import load

from tests.support.collective_weights import CollectiveWeights, Pairs, random_pairs
from tests.support.ray_get import ray_get
from tests.unit.client.servicer import Running, Servicer, start
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import ClientError, InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.client.servicer import StatusError

#: Where `make setup` puts it.
_VERL = Path(sys.prefix) / "opt/verl/verl"

ACTORS, ROLLOUTS = 3, 2
ENGINE = "weightsync_client.integrations.verl_engine"


# verl's own code.


def _compiled(path: str, names: tuple[str, ...], namespace: dict[str, Any]) -> dict[str, Any]:
    """Run the definitions of these names, "Class.method" for one method, of a file of verl."""
    found = {}
    for node in ast.parse((_VERL / path).read_text()).body:
        name = getattr(node, "name", "")
        found[name] = node
        for inner in getattr(node, "body", []) if isinstance(node, ast.ClassDef) else []:
            found[f"{name}.{getattr(inner, 'name', '')}"] = inner
    nodes: list[Any] = [found[name] for name in names]
    for name, node in zip(names, nodes, strict=True):
        if "." in name:
            node.decorator_list = []  # Ray's dispatch, and no_grad.
    module = ast.Module(nodes, type_ignores=[])
    # Annotations name types of Ray.
    flags = __future__.annotations.compiler_flag
    exec(compile(module, str(_VERL / path), "exec", flags), namespace)
    return namespace


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return verl's base class and registry, in the place from which the engine imports them."""
    module = ModuleType("verl.checkpoint_engine.base")
    namespace = {"ABC": ABC, "abstractmethod": abstractmethod, "torch": torch, "Any": Any}
    names = ("CheckpointEngineRegistry", "CheckpointEngine")
    module.__dict__.update(_compiled("checkpoint_engine/base.py", names, namespace))
    utils = ModuleType("verl.workers.rollout.utils")
    utils.__dict__.update(_compiled("workers/rollout/utils.py", ("ensure_async_iterator",), {}))
    for found in (module, utils):
        parts = found.__name__.split(".")
        for end in range(1, len(parts)):
            package = ".".join(parts[:end])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, found.__name__, found)
    monkeypatch.delitem(sys.modules, ENGINE, raising=False)
    importlib.import_module(ENGINE)
    yield module
    sys.modules.pop(ENGINE, None)


class _Group:
    """Ranks that each do what they are asked in a thread and an event loop of their own."""

    def __init__(self, engines: list[Any], pool: ThreadPoolExecutor) -> None:
        self.engines, self.world_size = engines, len(engines)
        self._pool = pool
        self.futures: list[Future[Any]] = []

    def execute_checkpoint_engine(self, method: list[str], **kwargs: list[Any]) -> list[Any]:
        arguments = [{k: v[rank] for k, v in kwargs.items()} for rank in range(self.world_size)]
        rows = zip(self.engines, method, arguments, strict=True)
        return [self._pool.submit(getattr(e, name), **options) for e, name, options in rows]

    def each(self, call: Callable[[int], Any]) -> list[Future[Any]]:
        ranks = range(self.world_size)
        self.futures = [self._pool.submit(asyncio.run, call(rank)) for rank in ranks]
        return self.futures


class _Actors(_Group):
    def __init__(self, engines: list[Any], pool: ThreadPoolExecutor) -> None:
        super().__init__(engines, pool)
        self.weights: Callable[[int], Iterator[tuple[str, torch.Tensor]]]

    def update_weights(self, global_steps: int | None, mode: str) -> list[Future[Any]]:
        assert mode == "weightsync"

        async def send(rank: int) -> Any:
            metrics = await self.engines[rank].send_weights(
                self.weights(rank), global_steps=global_steps
            )
            return metrics or {}

        return self.each(send)


class _Rollout(_Group):
    """As `CheckpointEngineWorker` and vLLM's `ServerAdapter` have it."""

    def __init__(self, engines: list[Any], pool: ThreadPoolExecutor) -> None:
        super().__init__(engines, pool)
        self.steps: list[int] = []
        path = "workers/rollout/vllm_rollout/vllm_rollout.py"
        names = ("ServerAdapter.update_weights", "ServerAdapter._update_delta_weights")
        adapter = _compiled(path, names, {"time": time, "logger": logging.getLogger("verl")})
        of_worker = ("CheckpointEngineWorker.update_weights",)
        worker = _compiled("checkpoint_engine/base.py", of_worker, {})
        self._worker_update = worker["update_weights"]
        kind = {name: adapter[name] for name in ("update_weights", "_update_delta_weights")}
        self._adapter = type("ServerAdapter", (), kind | {"_execute_method": self._refused})()
        self._adapter.use_shm = False
        self._adapter._ensure_server_handle = lambda: True
        step = SimpleNamespace(remote=self._step)
        self._adapter.server_handle = SimpleNamespace(set_global_steps=step)

    async def _refused(self, method: str, **_: Any) -> None:
        msg = f"verl's loader was called: {method}"
        raise AssertionError(msg)

    async def _step(self, step: int) -> None:
        self.steps.append(step)

    def update_weights(self, global_steps: int | None) -> list[Future[Any]]:
        async def receive(rank: int) -> None:
            worker = SimpleNamespace(
                checkpoint_engine=self.engines[rank], server_adapter=self._adapter
            )
            await self._worker_update(worker, global_steps)

        return self.each(receive)


class _Manager:
    """verl's own `build_process_group` and `update_weights`."""

    backend = "weightsync"

    def __init__(self, base: ModuleType, actors: _Actors, rollout: _Rollout) -> None:
        self.actor_wg, self.rollout = actors, rollout
        self.backend_cls = base.CheckpointEngineRegistry.get("weightsync")
        self.replicas = [SimpleNamespace(workers=[])]
        self.did: list[str] = []
        namespace: dict[str, Any] = {
            "ray": SimpleNamespace(get=ray_get),
            "RayWorkerGroup": lambda **_: rollout,
            "RayClassWithInitArgs": lambda **_: None,
            "_worker_cls": None,
        }
        names = ("build_process_group", "update_weights")
        methods = tuple(f"CheckpointEngineManager.{name}" for name in names)
        self._verl = _compiled("checkpoint_engine/base.py", methods, namespace)

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_replicas"):
            raise AttributeError(name)

        async def done() -> None:
            self.did.append(name)

        return done

    def build_process_group(self, rollout: Any) -> None:
        self._verl["build_process_group"](self, rollout)

    def sync(self, step: int | None = None) -> dict[str, Any]:
        found: dict[str, Any] = asyncio.run(self._verl["update_weights"](self, step))
        return found

    def join(self) -> list[BaseException | None]:
        """Return how every rank of the actor ended, once all ranks of both did."""
        futures = [*self.actor_wg.futures, *self.rollout.futures]
        assert not wait(futures, timeout=30).not_done
        return [future.exception() for future in self.actor_wg.futures]


# The server.


class _Server(Servicer):
    """Tells the ranks of its engine."""

    ranks = ROLLOUTS

    def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        reply = super().GetStatus(request, context)
        ranks = [pb.RankResult(rank=f"{r}/0/0", version=self.live) for r in range(self.ranks)]
        reply.models[0].engine.ranks.extend(ranks)
        return reply

    def ApplyVersion(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name of the RPC
        reply = super().ApplyVersion(request, context)
        ranks = [pb.RankResult(rank=f"{r}/0/0") for r in range(1, self.ranks)]
        reply.report.ranks.extend(ranks)
        return reply


@pytest.fixture
def running() -> Iterator[Running]:
    server = start(_Server())
    yield server
    server.stop()


@pytest.fixture
def servicer(running: Running) -> _Server:
    assert isinstance(running.servicer, _Server)
    return running.servicer


# The ranks.


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(ACTORS + ROLLOUTS) as pool:
        yield pool


@pytest.fixture
def make(base: ModuleType, running: Running, pool: ThreadPoolExecutor) -> Callable[..., _Manager]:
    """Make all ranks as verl does, and its manager."""

    def make(pairs: Pairs | None = None, fails_at: int | None = None, **options: Any) -> _Manager:
        options = {"address": running.address, "timeout_s": 20.0} | options
        new = base.CheckpointEngineRegistry.new
        actors = _Actors(
            [
                new("weightsync", is_master=rank == 0, bucket_size=1 << 20, **options)
                for rank in range(ACTORS)
            ],
            pool,
        )
        weights = random_pairs() if pairs is None else pairs
        actors.weights = CollectiveWeights(weights, ACTORS, fails_at)
        receivers = [new("weightsync", bucket_size=1 << 20, **options) for _ in range(ROLLOUTS)]
        return _Manager(base, actors, _Rollout(receivers, pool))

    return make


def _live(servicer: _Server) -> dict[str, torch.Tensor]:
    (upload,) = (u for u in servicer.uploads.values() if u.commit and u.version == servicer.live)
    return {n: t for shard in upload.shards.values() for n, t in load(bytes(shard.data)).items()}


def _serves(servicer: _Server, pairs: Pairs) -> bool:
    found = _live(servicer)
    return found.keys() == {name for name, _ in pairs} and all(
        torch.equal(found[name], tensor) for name, tensor in pairs
    )


def _metadata(servicer: _Server) -> list[dict[str, str]]:
    return [dict(u.request.metadata) for u in servicer.uploads.values() if u.commit]


def _refuse(servicer: _Server, call: str, error: Exception) -> None:
    def before(method: str, _request: Any) -> None:
        if method == call:
            raise error

    servicer.before = before


# The contract.


def test_it_has_the_methods_and_arguments_of_verls_base_class(base: ModuleType) -> None:
    engine = base.CheckpointEngineRegistry.get("weightsync")
    assert issubclass(engine, base.CheckpointEngine)
    assert not engine.__abstractmethods__
    for name in ("prepare", "build_topology", "finalize", "send_weights", "receive_weights"):
        theirs = inspect.signature(getattr(base.CheckpointEngine, name)).parameters
        assert list(inspect.signature(getattr(engine, name)).parameters) == list(theirs)


def test_verl_imports_the_module_by_its_configured_name(base: ModuleType) -> None:
    path = "utils/import_utils.py"
    namespace = _compiled(path, ("import_external_libs",), {"importlib": importlib})
    del base.CheckpointEngineRegistry._registry["weightsync"]
    sys.modules.pop(ENGINE)
    namespace["import_external_libs"](ENGINE)
    assert base.CheckpointEngineRegistry.get("weightsync").__module__ == ENGINE


# A weight sync.


def test_the_rollout_serves_the_weights_to_the_bit_and_verls_loader_gets_none(
    make: Callable[..., _Manager], servicer: _Server
) -> None:
    manager = make()
    metrics = manager.sync(7)
    assert metrics["weightsync/version"] == servicer.live == 1
    assert metrics["weightsync/paused_seconds"] == 0.0125
    assert _serves(servicer, random_pairs())
    assert _metadata(servicer)[0]["step"] == "7"
    assert manager.actor_wg.weights.read == [5] * ACTORS  # type: ignore[attr-defined]
    assert manager.rollout.steps == [7] * ROLLOUTS
    assert manager.did[0] == "abort_replicas"
    assert manager.did[-1] == "resume_generation_replicas"
    assert servicer.calls.count("ApplyVersion") == 1


def test_every_weight_sync_is_a_version_also_of_a_step_that_is_repeated(
    make: Callable[..., _Manager], servicer: _Server
) -> None:
    manager = make()
    for seed in range(3):
        manager.actor_wg.weights = CollectiveWeights(random_pairs(seed), ACTORS)
        manager.sync(1)
        assert servicer.live == seed + 1
        assert _serves(servicer, random_pairs(seed))
    assert len({entry["sync_id"] for entry in _metadata(servicer)}) == 3


def test_a_weight_sync_without_a_step(make: Callable[..., _Manager], servicer: _Server) -> None:
    manager = make()
    manager.sync()
    assert list(_metadata(servicer)[0]) == ["sync_id"]
    assert manager.rollout.steps == []


def test_options_of_push_and_apply_are_passed_on(
    make: Callable[..., _Manager], servicer: _Server
) -> None:
    push = {"metadata": {"run_id": "mine"}, "delta": "never"}
    make(push=push, apply={"pause": "abort"}).sync(1)
    assert _metadata(servicer)[0]["run_id"] == "mine"
    (request,) = (r for r in servicer.requests if isinstance(r, pb.ApplyVersionRequest))
    assert request.pause.mode == pb.PAUSE_MODE_ABORT


def test_ranks_of_one_event_loop_do_not_wait_for_each_other(
    make: Callable[..., _Manager], servicer: _Server
) -> None:
    manager = make()
    manager.build_process_group(manager.rollout)
    weights, engines = manager.actor_wg.weights, manager.actor_wg.engines

    async def send() -> None:
        await asyncio.gather(*(e.send_weights(weights(r), 1) for r, e in enumerate(engines)))

    asyncio.run(send())
    assert servicer.live == 1


def test_the_rollout_is_not_content_with_the_version_of_another_weight_sync(
    make: Callable[..., _Manager], servicer: _Server
) -> None:
    manager = make(timeout_s=1.0)
    manager.sync(1)
    manager.build_process_group(manager.rollout)
    servicer.calls.clear()
    with pytest.raises(ClientError, match="of step 1 was not live within 1 s"):
        ray_get(manager.rollout.update_weights(1))
    # Its tensors are only asked for once by each rank.
    assert servicer.calls.count("GetVersion") == ROLLOUTS
    assert servicer.calls.count("GetStatus") > 2 * ROLLOUTS


def test_the_rollout_waits_for_a_server_that_restarts(
    make: Callable[..., _Manager], servicer: _Server, status_error: type[StatusError]
) -> None:
    manager = make()
    manager.build_process_group(manager.rollout)
    away = [12]

    def before(method: str, _request: Any) -> None:
        if method == "GetStatus" and away[0] > 0:
            away[0] -= 1
            raise status_error(grpc.StatusCode.UNAVAILABLE, "restarting")

    servicer.before = before
    futures = manager.rollout.update_weights(3)
    ray_get([*manager.actor_wg.update_weights(3, "weightsync"), *futures])
    assert manager.rollout.steps == [3] * ROLLOUTS


# Errors.


def test_a_refused_push_ends_all_ranks_with_our_sentence(
    make: Callable[..., _Manager], servicer: _Server
) -> None:
    manager = make(timeout_s=1.0)
    _refuse(servicer, "BeginPush", WeightSyncError(Reason.DISK_EXHAUSTED, "the store is full"))
    with pytest.raises(ClientError, match="the store is full") as caught:
        manager.sync(1)
    assert caught.value.reason is Reason.DISK_EXHAUSTED
    errors = manager.join()
    assert isinstance(errors[0], ClientError)
    assert errors[1:] == [None] * (ACTORS - 1)
    assert manager.actor_wg.weights.read == [5] * ACTORS  # type: ignore[attr-defined]
    for future in manager.rollout.futures:
        with pytest.raises(ClientError, match="of step 1 was not live within 1 s; see the error"):
            future.result()
    assert servicer.live == 0


def test_the_next_weight_sync_goes_on_after_one_that_failed(
    make: Callable[..., _Manager], servicer: _Server
) -> None:
    manager = make()
    _refuse(servicer, "CommitPush", WeightSyncError(Reason.DISK_EXHAUSTED, "the store is full"))
    for engine in manager.rollout.engines:
        engine._timeout_s = 1.5
    with pytest.raises(ClientError, match="the store is full"):
        manager.sync(1)
    manager.join()
    servicer.before = lambda _method, _request: None
    for engine in manager.rollout.engines:
        engine._timeout_s = 20
    manager.actor_wg.weights = CollectiveWeights(random_pairs(1), ACTORS)
    manager.sync(1)
    assert _serves(servicer, random_pairs(1))


@pytest.mark.parametrize(
    ("reason", "remedies"),
    [
        (Reason.ENGINE_REFUSED, []),
        (Reason.ENGINE_ASLEEP, ["set rollout.free_cache_engine to False"]),
    ],
)
def test_a_refused_apply_tells_the_version(
    make: Callable[..., _Manager], servicer: _Server, reason: Reason, remedies: list[str]
) -> None:
    manager = make(timeout_s=3.0)
    _refuse(servicer, "ApplyVersion", WeightSyncError(reason, "not now"))
    with pytest.raises(ClientError, match="not now") as caught:
        manager.sync(1)
    manager.join()
    assert caught.value.reason is reason
    notes = ["the weights are version 1, which was not applied", *remedies]
    assert caught.value.__notes__ == notes


def test_an_error_of_the_weights_is_raised_as_it_is(
    make: Callable[..., _Manager], servicer: _Server
) -> None:
    manager = make(fails_at=2, timeout_s=1.5)
    with pytest.raises(ValueError, match="the gather failed"):
        manager.sync(1)
    assert [type(error) for error in manager.join()] == [ValueError] * ACTORS
    assert servicer.live == 0


def test_a_server_that_is_away_is_found_before_any_weight_is_read(
    make: Callable[..., _Manager], running: Running
) -> None:
    manager = make()
    running.stop()
    with pytest.raises(ClientError, match="check that weightsync-server runs there"):
        manager.sync(1)
    assert manager.actor_wg.weights.read == [0] * ACTORS  # type: ignore[attr-defined]


def test_a_model_that_the_server_does_not_have_is_found_by_every_rank(
    make: Callable[..., _Manager],
) -> None:
    manager = make(model="other")
    with pytest.raises(ClientError, match="has no model 'other', but policy; correct model"):
        manager.sync(1)
    for engine in manager.rollout.engines:
        engine.init_process_group("sync", ROLLOUTS)
    with pytest.raises(ClientError, match="the server has no model 'other'"):
        ray_get(manager.rollout.update_weights(1))


def test_a_weight_sync_that_has_not_begun_is_refused_and_all_ranks_end(
    make: Callable[..., _Manager],
) -> None:
    manager = make()
    futures = manager.actor_wg.update_weights(1, "weightsync")
    with pytest.raises(ClientError, match="no weight sync has begun"):
        ray_get(futures)
    assert manager.join()[1:] == [None] * (ACTORS - 1)
    with pytest.raises(ClientError, match="no weight sync has begun"):
        ray_get(manager.rollout.update_weights(1))


@pytest.mark.parametrize("live", [0, 1])
def test_ranks_that_the_engine_does_not_have_are_not_left_with_old_weights(
    make: Callable[..., _Manager], servicer: _Server, live: int
) -> None:
    servicer.ranks = 1
    servicer.live = live
    manager = make(timeout_s=3.0)
    with pytest.raises(ClientError, match=r"the rollout has 2 ranks, but .* has 1, and"):
        manager.sync(1)
    manager.join()
    # Before the first version the ranks are only known by the apply.
    assert ("BeginPush" in servicer.calls) == (live == 0)


async def test_a_cancelled_weight_sync_makes_nothing_live(
    base: ModuleType, running: Running, servicer: _Server
) -> None:
    engine = base.CheckpointEngineRegistry.new(
        "weightsync", is_master=True, bucket_size=1, address=running.address
    )
    begun, go_on = threading.Event(), threading.Event()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in random_pairs():
            begun.set()
            assert go_on.wait(20)
            yield pair

    engine.init_process_group("sync", ROLLOUTS)
    sending = asyncio.create_task(engine.send_weights(weights(), 1))
    await asyncio.to_thread(begun.wait, 20)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()  # The push has ended.
    assert len(_metadata(servicer)) == 1
    assert "ApplyVersion" not in servicer.calls


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"timeout_s": -1}, InvalidError, "timeout_s is -1; use seconds"),
        ({"push": {"version": 3}}, ClientError, "version is given for all steps"),
        ({"apply": {"pauze": "keep"}}, TypeError, "Did you mean 'pause'"),
        ({"adress": "x"}, TypeError, "adress"),
    ],
)
def test_arguments_are_checked_when_verl_makes_it(
    make: Callable[..., _Manager], options: Any, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        make(**options)
