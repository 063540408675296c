"""The checkpoint engine as NeMo-RL calls it, against a real server whose engine has two ranks.

Written down from NVIDIA-NeMo/RL at 7ea279abfbeb698b092856d0dab61e7cf39bc909: the methods from
nemo_rl/utils/checkpoint_engines/base.py, the order of calls from
nemo_rl/weight_sync/checkpoint_engine_weight_synchronizer.py, and what each worker adds to them from
checkpoint_engine.py in nemo_rl/models/policy/workers and nemo_rl/models/generation/vllm. There a
rank is an actor of Ray, here a thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.collective_weights import CollectiveWeights, random_pairs
from tests.support.ray_get import ray_get
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, ClientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.collective_weights import Pairs

pytestmark = pytest.mark.timeout(120)

POLICIES, ROLLOUTS = 3, 2

#: What a configuration has as `policy.generation.refit_transport`.
TRANSPORT = "weightsync_client.integrations.nemo_rl_engine:WeightSyncRefitEngine"

#: Parameters that NeMo-RL gives by name, and those that it gives by place.
_GROUP = ["train_world_size", "rollout_world_size", "metadata"]
_METHODS: dict[str, tuple[list[str], list[str]]] = {
    "prepare": ([], []),
    "get_target_weight_layout": ([], []),
    "init_policy_process_group": (["worker_rank", *_GROUP], []),
    "init_rollout_process_group": (["rollout_rank", *_GROUP], []),
    "finalize": ([], []),
    "send_weights": ([], ["weights"]),
    "receive_weight_batches": ([], []),
}


def _made(scope: dict[str, Any] | None = None, bucket_size: int = 1 << 20) -> Any:
    """Return an engine as `create_checkpoint_engine` makes it of the scope in `refit_cfg`."""
    module, name = TRANSPORT.split(":", 1)
    kind = getattr(importlib.import_module(module), name)
    return kind(bucket_size=bucket_size, **{"release_after_refit": False, **(scope or {})})


class _Synchronizer:
    """Calls the engines of all workers in the order of NeMo-RL's."""

    def __init__(self, pool: ThreadPoolExecutor, rollouts: int, **scope: Any) -> None:
        self._pool, self.scope = pool, scope
        self._releases = bool(scope.get("release_after_refit"))
        self._ready = False
        self.policies = [_made(scope) for _ in range(POLICIES)]
        self.rollouts = [_made(scope) for _ in range(rollouts)]
        self.sent: list[Future[Any]] = []
        #: What the loader of each rank of the rollout got, batch by batch.
        self.loaded: list[list[Pairs]] = []

    def init_communicator(self) -> None:
        if self._ready:
            return
        ranked = [
            [{**engine.prepare(), "rank": rank} for rank, engine in enumerate(engines)]
            for engines in (self.policies, self.rollouts)
        ]
        topology = {
            "metadata": [*ranked[0], *ranked[1]],
            "train_world_size": len(self.policies),
            "rollout_world_size": len(self.rollouts),
        }
        futures = [
            self._pool.submit(engine.init_policy_process_group, worker_rank=rank, **topology)
            for rank, engine in enumerate(self.policies)
        ]
        futures += [
            self._pool.submit(engine.init_rollout_process_group, rollout_rank=rank, **topology)
            for rank, engine in enumerate(self.rollouts)
        ]
        ray_get(futures)
        self._ready = True

    def sync_weights(self, weights: CollectiveWeights) -> None:
        self.init_communicator()
        try:
            self.sent = [
                self._pool.submit(self._send, engine, weights(rank))
                for rank, engine in enumerate(self.policies)
            ]
            self.loaded = [[] for _ in self.rollouts]
            received = [
                self._pool.submit(self.receive, engine, loaded)
                for engine, loaded in zip(self.rollouts, self.loaded, strict=True)
            ]
            assert all(ray_get([*self.sent, *received])[POLICIES:])
        finally:
            if self._releases:
                self.shutdown()

    def shutdown(self) -> None:
        for engine in [*self.policies, *self.rollouts]:
            engine.finalize()
        self._ready = False

    def _send(self, engine: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        assert not engine.shard_expert_weights
        assert engine.get_target_weight_layout() is None
        with torch.no_grad():
            asyncio.run(engine.send_weights(weights))

    def receive(self, engine: Any, loaded: list[Pairs]) -> bool:
        async def load() -> None:
            loaded.extend([batch async for batch in engine.receive_weight_batches()])

        asyncio.run(load())
        return True

    def ended(self) -> list[BaseException | None]:
        """Return how every rank of the policy ended, once all did."""
        assert not wait(self.sent, timeout=30).not_done
        return [future.exception() for future in self.sent]


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[WeightSyncServer]:
    # Short: unix sockets allow 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="wsn"))
    save_file(dict(random_pairs(99)), folder / "model.safetensors")
    engine = "--engine", "memory", "--model", str(folder), "--ranks", str(ROLLOUTS)
    server = WeightSyncServer(folder / "run", folder / "state", flags=engine)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def make(server: WeightSyncServer) -> Iterator[Callable[..., _Synchronizer]]:
    """Make the engines of all workers."""
    with ThreadPoolExecutor(POLICIES + 2 * ROLLOUTS) as pool:

        def make(rollouts: int = ROLLOUTS, **scope: Any) -> _Synchronizer:
            return _Synchronizer(pool, rollouts, **{"address": server.address, **scope})

        yield make


def _weights(seed: int, fails_at: int | None = None) -> CollectiveWeights:
    return CollectiveWeights(random_pairs(seed), POLICIES, fails_at)


def _serves(server: WeightSyncServer, pairs: Pairs) -> bool:
    """Whether the engine has proved that it has these weights, to the bit."""
    with Client(server.address) as client:
        tensors = {tensor.name: tensor.torch() for tensor in client.tensors()}
        proved = client.verify(_live(server)).verified
    return proved and all(torch.equal(tensors[name], tensor) for name, tensor in pairs)


def _live(server: WeightSyncServer) -> int:
    with Client(server.address) as client:
        return client.status().models[0].live_version


# The contract.


@pytest.mark.parametrize("name", _METHODS)
def test_it_has_the_methods_that_are_called_with_their_parameters(name: str) -> None:
    by_name, by_place = _METHODS[name]
    found = list(inspect.signature(getattr(_made(), name)).parameters.values())
    assert [p.name for p in found if p.kind is p.KEYWORD_ONLY] == by_name
    assert [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD] == by_place
    method = getattr(_made(), name)
    assert inspect.iscoroutinefunction(method) == (name == "send_weights")
    assert inspect.isasyncgenfunction(method) == (name == "receive_weight_batches")


def test_a_misspelt_key_of_its_scope_is_refused() -> None:
    with pytest.raises(TypeError, match="adress"):
        _made({"adress": "127.0.0.1:1"})
    with pytest.raises(TypeError, match="Did you mean 'pause'"):
        _made({"apply": {"pauze": "keep"}})
    with pytest.raises(ClientError, match="version is given for all steps"):
        _made({"push": {"version": 3}})


# A sync.


@pytest.mark.parametrize("releases", [False, True])
def test_with_apply_the_rollout_serves_each_sync_and_its_loader_gets_none(
    server: WeightSyncServer, make: Callable[..., _Synchronizer], *, releases: bool
) -> None:
    options = {"apply": {"pause": "keep"}, "push": {"metadata": {"team": "red"}}}
    synchronizer = make(release_after_refit=releases, **options)
    synchronizer.init_communicator()
    before, runs = _live(server), set()
    for sync in range(1, 4):
        weights = _weights(sync)
        synchronizer.sync_weights(weights)
        assert _serves(server, random_pairs(sync))
        assert weights.read == [5] * POLICIES
        assert _live(server) > before
        with Client(server.address) as client:
            metadata = client.get_version().metadata
        assert (metadata["team"], metadata["sync"]) == ("red", str(sync))
        runs.add(metadata["run_id"])
        assert synchronizer.loaded == [[]] * ROLLOUTS
    assert len(runs) == 1


@pytest.mark.parametrize("releases", [False, True])
def test_without_apply_every_loader_gets_each_sync_to_the_bit(
    server: WeightSyncServer, make: Callable[..., _Synchronizer], *, releases: bool
) -> None:
    # The ranks of all replicas, as many as there are.
    synchronizer = make(rollouts=2 * ROLLOUTS, release_after_refit=releases)
    live = _live(server)
    for sync in range(1, 4):
        weights = _weights(sync)
        synchronizer.sync_weights(weights)
        assert weights.read == [5] * POLICIES
        assert len(synchronizer.loaded) == 2 * ROLLOUTS
        for batches in synchronizer.loaded:
            loaded = {name: tensor for batch in batches for name, tensor in batch}
            assert loaded.keys() == {name for name, _ in random_pairs()}
            assert all(torch.equal(loaded[name], tensor) for name, tensor in random_pairs(sync))
    assert _live(server) == live


def test_a_loader_gets_as_many_bytes_at_a_time_as_it_has_asked_for(
    make: Callable[..., _Synchronizer],
) -> None:
    synchronizer = make()
    (size,) = {tensor.nbytes for _, tensor in random_pairs()}
    synchronizer.rollouts = [_made(synchronizer.scope, bucket) for bucket in (1, 2 * size)]
    synchronizer.sync_weights(_weights(1))
    batches = [[len(batch) for batch in loaded] for loaded in synchronizer.loaded]
    assert batches == [[1] * 5, [2, 2, 1]]


def test_with_apply_a_rollout_waits_for_nothing_as_the_apply_waits_for_it(
    server: WeightSyncServer, make: Callable[..., _Synchronizer]
) -> None:
    synchronizer = make(apply={})
    synchronizer.init_communicator()
    before = _live(server)
    assert synchronizer.receive(synchronizer.rollouts[0], [])
    assert _live(server) == before


# Errors.


def test_what_the_engine_cannot_load_changes_nothing_and_the_next_sync_works(
    server: WeightSyncServer, make: Callable[..., _Synchronizer]
) -> None:
    synchronizer = make(apply={})
    synchronizer.sync_weights(_weights(10))
    before = _live(server)
    wrong = [*random_pairs(11)[:-1], ("layer.4", torch.zeros(3, dtype=torch.bfloat16))]
    weights = CollectiveWeights(wrong, POLICIES)
    with pytest.raises(ClientError, match=r"layer\.4"):
        synchronizer.sync_weights(weights)
    errors = synchronizer.ended()
    assert isinstance(errors[0], ClientError)
    assert errors[1:] == [None] * (POLICIES - 1)
    assert weights.read == [5] * POLICIES
    assert _live(server) == before
    assert _serves(server, random_pairs(10))
    synchronizer.sync_weights(_weights(12))
    assert _serves(server, random_pairs(12))


def test_an_error_of_the_weights_is_raised_as_it_is(
    server: WeightSyncServer, make: Callable[..., _Synchronizer]
) -> None:
    synchronizer, before = make(timeout_s=0.5), _live(server)
    with pytest.raises(ValueError, match="the gather failed"):
        synchronizer.sync_weights(_weights(20, fails_at=2))
    assert [type(error) for error in synchronizer.ended()] == [ValueError] * POLICIES
    assert _live(server) == before


def test_a_rollout_does_not_wait_for_ever_for_a_policy_that_failed(
    make: Callable[..., _Synchronizer],
) -> None:
    synchronizer = make(timeout_s=0.5)
    synchronizer.sync_weights(_weights(40))
    synchronizer.policies[0].finalize()
    with pytest.raises(ClientError, match="no sync has been prepared"):
        synchronizer.sync_weights(_weights(41))
    with pytest.raises(ClientError, match=r"of sync 3 did not arrive within 0\.5 s; see the error"):
        synchronizer.receive(synchronizer.rollouts[0], [])


def test_a_sync_that_was_not_prepared_is_refused_and_all_ranks_end(
    make: Callable[..., _Synchronizer],
) -> None:
    synchronizer = make(timeout_s=0.5)
    synchronizer.init_communicator()
    synchronizer.policies[0].finalize()
    weights = _weights(30)
    with pytest.raises(ClientError, match="no sync has been prepared"):
        synchronizer.sync_weights(weights)
    assert synchronizer.ended()[1:] == [None] * (POLICIES - 1)
    assert weights.read == [5] * POLICIES


def test_ranks_that_the_engine_does_not_have_are_found_before_the_first_sync(
    make: Callable[..., _Synchronizer],
) -> None:
    with pytest.raises(ClientError, match=r"the rollout has 4 ranks, but .* has 2, and"):
        make(rollouts=4, apply={}).init_communicator()


def test_a_server_or_model_that_is_not_there_is_found_before_the_first_sync(
    make: Callable[..., _Synchronizer], tmp_path: Path
) -> None:
    with pytest.raises(ClientError, match="the server has no model 'other'"):
        make(model="other").init_communicator()
    with pytest.raises(ClientError, match="check that weightsync-server runs there"):
        make(address=f"unix:{tmp_path}/nobody.sock").init_communicator()
