"""The trainer side of vLLM's backend, made by vLLM's own factory, against a real gRPC server."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch
from safetensors.torch import load
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightsync_client import Client, ClientError, InvalidError, Retry, UnavailableError
from weightsync_client.integrations import WeightSyncTrainerEngine, WeightSyncTrainerInitInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.client.servicer import Running, Servicer, StatusError


class _Model(torch.nn.Module):
    def __init__(self, step: int = 0) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.empty(8, 4))
        self.norm = torch.nn.Parameter(torch.empty(4))
        self.step(step)

    def step(self, number: int) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.fill_(number + index / 2)


class _Verbs:
    """A client of vLLM that notes the verbs, and what was live at each."""

    def __init__(self, servicer: Servicer, failing: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._servicer, self._failing = servicer, failing

    def _note(self, *call: Any) -> None:
        self.calls.append((*call, self._servicer.live))
        if call[0] == self._failing:
            raise OSError("vLLM is away")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._note("init", init_info)

    def start_weight_update(self) -> None:
        self._note("start")

    def update_weights(self, update_info: Any) -> None:
        self._note("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._note("finish", weight_version)


class _Source(WeightSource):  # type: ignore[misc]  # Any here
    """As a gather has it: each pass is read in step with other ranks."""

    def __init__(self, ranks: int = 1, names: tuple[str, ...] = ("a", "b", "c")) -> None:
        self.names = names
        self.read: list[str] = []
        self.error_at = ""
        self._barrier = threading.Barrier(ranks, timeout=10)

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, torch.float32, (4,)) for name in self.names]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.names:
            self._barrier.wait()
            if name == self.error_at:
                raise RuntimeError("a rank is gone")
            yield name, torch.ones(4)
            self.read.append(name)


class _Part(_Source):
    def held_names(self) -> list[str]:
        return ["a"]


class _NewSource:
    """As vLLM 0.33 has it: vllm-project/vllm v0.33.0, vllm/distributed/weight_transfer/base.py."""

    def __init__(self, *, full: bool = True, owners: tuple[int, ...] | None = None) -> None:
        self.full, self.owners = full, owners

    @property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, torch.float32, (4,)) for name in "ab"]

    def owned_names(self, rank: int) -> list[str]:
        return ["a"] if self.owners is not None and rank not in self.owners else ["a", "b"]

    def implements_iter_full(self) -> bool:
        return self.full

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in "ab":
            yield name, torch.ones(4)


@pytest.fixture
def make(running: Running, retry: Retry) -> Iterator[Callable[..., WeightSyncTrainerEngine]]:
    """Make a trainer side by vLLM's factory, which gives up soon."""
    made: list[WeightSyncTrainerEngine] = []

    def make(
        source: Any, client: Any = None, *, rank: int = 0, **options: Any
    ) -> WeightSyncTrainerEngine:
        options = {"server": running.address, "client": {"retry": retry}, **options}
        about = WeightSyncTrainerInitInfo(rank=rank, **options)
        trainer = WeightTransferTrainerFactory.trainer_init(about, client=client, source=source)
        made.append(trainer)
        return made[-1]

    yield make
    for trainer in made:
        trainer.shutdown()


def _committed(servicer: Servicer) -> list[Any]:
    return [upload for upload in servicer.uploads.values() if upload.commit]


def _tensors(upload: Any) -> dict[str, torch.Tensor]:
    shards = upload.shards.values()
    return {name: t for s in shards for name, t in load(bytes(s.data)).items()}


def _refuse(servicer: Servicer, status_error: type[StatusError], call: str) -> None:
    def before(method: str, _request: Any) -> None:
        if method == call:
            raise status_error(grpc.StatusCode.FAILED_PRECONDITION, "the store is full")

    servicer.before = before


# What vLLM asks for.


def test_it_is_what_vllms_base_class_asks_for() -> None:
    assert issubclass(WeightSyncTrainerEngine, TrainerWeightTransferEngine)
    assert isinstance(_Verbs.__new__(_Verbs), VLLMWeightSyncClient)
    for name in ("trainer_init", "send_weights", "shutdown"):
        theirs = inspect.signature(getattr(TrainerWeightTransferEngine, name)).parameters
        ours = inspect.signature(getattr(WeightSyncTrainerEngine, name)).parameters
        assert theirs.keys() <= ours.keys()
        rest = [ours[name] for name in ours.keys() - theirs.keys()]
        assert all(parameter.default is not parameter.empty for parameter in rest)


def test_each_send_is_a_version_that_is_served_when_it_returns(
    make: Callable[..., WeightSyncTrainerEngine], servicer: Servicer
) -> None:
    model, verbs = _Model(), _Verbs(servicer)
    trainer = make(ModuleSource(model), verbs, run_id="mine", apply={"pause": "abort"})
    assert verbs.calls == [("init", {}, 0)]
    for step in (1, 2):
        model.step(step)
        trainer.send_weights()
        expected = {name: p.detach() for name, p in model.named_parameters()}
        found = _tensors(_committed(servicer)[-1])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    assert verbs.calls[1:] == [
        call
        for version in (1, 2)
        for call in (
            ("start", version),
            ("update", {"version": version}, version),
            ("finish", None, version),
        )
    ]
    assert [dict(upload.request.metadata) for upload in _committed(servicer)] == [
        {"run_id": "mine", "sync": sync} for sync in ("1", "2")
    ]
    applies = [r for r in servicer.requests if type(r).__name__ == "ApplyVersionRequest"]
    assert [request.pause.mode for request in applies] == [3, 3]
    assert trainer.last is not None
    assert trainer.last.push.version == 2


def test_the_factory_of_vllm_0_26_makes_it_too(running: Running, servicer: Servicer) -> None:
    # vllm-project/vllm v0.26.0, vllm/distributed/weight_transfer/factory.py.
    about = WeightSyncTrainerInitInfo(running.address, rank=0)
    trainer = WeightSyncTrainerEngine.trainer_init(
        config=object(), init_info=about, client=_Verbs(servicer), source=_Source()
    )
    trainer.send_weights()
    trainer.shutdown()
    assert servicer.live == 1


def test_a_source_of_vllm_0_33_is_read_in_full(
    make: Callable[..., WeightSyncTrainerEngine], servicer: Servicer
) -> None:
    # A rank that lacks a tensor takes no part in gathering it.
    trainer, other = (make(_NewSource(owners=(0,)), rank=rank) for rank in (0, 1))
    for live in (1, 2):
        trainer.send_weights()
        other.send_weights()
        assert servicer.live == live
    assert _tensors(_committed(servicer)[-1]).keys() == {"a", "b"}


def test_without_a_client_only_the_server_is_called(
    make: Callable[..., WeightSyncTrainerEngine], servicer: Servicer
) -> None:
    make(_Source()).send_weights()
    assert servicer.live == 1


def test_what_is_only_pushed_calls_no_verb(
    make: Callable[..., WeightSyncTrainerEngine], servicer: Servicer
) -> None:
    verbs = _Verbs(servicer)
    make(_Source(), verbs, apply=False).send_weights()
    assert len(_committed(servicer)) == 1
    assert verbs.calls == [("init", {}, 0)]
    assert "ApplyVersion" not in servicer.calls


def test_a_partial_version_may_be_based_on_another_run(
    make: Callable[..., WeightSyncTrainerEngine], servicer: Servicer, client: Client
) -> None:
    whole = {name: torch.zeros(4) for name in "abcd"}
    client.apply(client.push(whole, metadata={"run_id": "earlier"}).version)
    make(_Source(), push={"partial": True}).send_weights()
    upload = _committed(servicer)[-1]
    assert dict(upload.request.metadata) == {"sync": "1"}
    assert torch.equal(_tensors(upload)["d"], whole["d"])
    assert torch.equal(_tensors(upload)["a"], torch.ones(4))


# What fails.


@pytest.mark.parametrize("call", ["BeginPush", "CommitPush", "ApplyVersion"])
def test_no_rank_waits_for_one_whose_push_fails(
    make: Callable[..., WeightSyncTrainerEngine],
    servicer: Servicer,
    status_error: type[StatusError],
    call: str,
) -> None:
    _refuse(servicer, status_error, call)
    source, verbs = _Source(ranks=2), _Verbs(servicer)
    sender, other = make(source, verbs), make(source, verbs, rank=1)
    thread = threading.Thread(target=other.send_weights)
    thread.start()
    with pytest.raises(ClientError, match="the store is full") as caught:
        sender.send_weights()
    thread.join(10)
    assert not thread.is_alive()
    assert sorted(source.read) == ["a", "a", "b", "b", "c", "c"]
    notes = getattr(caught.value, "__notes__", [])
    assert notes == (
        ["sync 1 is version 1, which was not applied"] if call == "ApplyVersion" else []
    )
    assert verbs.calls == [("init", {}, 0)]
    assert (sender.last, other.last) == (None, None)
    servicer.before = lambda _method, _request: None
    alone = make(_Source())
    alone.send_weights()
    assert servicer.live == _committed(servicer)[-1].version


def test_no_rank_waits_for_one_whose_server_went_away(
    make: Callable[..., WeightSyncTrainerEngine], running: Running
) -> None:
    source = _Source()
    trainer = make(source)
    running.stop()
    with pytest.raises(UnavailableError):
        trainer.send_weights()
    assert source.read == ["a", "b", "c"]


def test_an_error_of_the_source_is_raised_and_nothing_exists(
    make: Callable[..., WeightSyncTrainerEngine], servicer: Servicer
) -> None:
    source = _Source()
    source.error_at = "b"
    with pytest.raises(RuntimeError, match="a rank is gone"):
        make(source).send_weights()
    assert _committed(servicer) == []
    assert servicer.live == 0


@pytest.mark.parametrize("verb", ["start", "update", "finish"])
def test_a_verb_that_fails_after_the_apply_says_what_is_served(
    make: Callable[..., WeightSyncTrainerEngine], servicer: Servicer, verb: str
) -> None:
    trainer = make(_Source(), _Verbs(servicer, failing=verb))
    with pytest.raises(OSError, match="vLLM is away") as caught:
        trainer.send_weights()
    assert caught.value.__notes__ == ["sync 1 is version 1, which is served"]
    assert servicer.live == 1
    assert trainer.last is not None


def test_what_is_away_is_found_before_the_first_send(
    make: Callable[..., WeightSyncTrainerEngine], running: Running, servicer: Servicer
) -> None:
    with pytest.raises(OSError, match="vLLM is away"):
        make(_Source(), _Verbs(servicer, failing="init"))
    running.stop()
    verbs = _Verbs(servicer)
    with pytest.raises(UnavailableError, match="check that weightsync-server runs there"):
        make(_Source(), verbs)
    assert verbs.calls == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (None, "source must give all weights, in full, each time"),
        (iter([("a", torch.ones(1))]), "source must give all weights, in full, each time"),
        (_NewSource(full=False), "source must give all weights, in full, each time"),
        (_NewSource(owners=(1,)), "rank 0 lacks 1 of the 2 tensors of the model, such as 'b'"),
        (_Part(), "this source lacks 2 of the 3 tensors of the model, such as 'b'"),
    ],
)
def test_a_source_that_cannot_be_is_refused_on_every_rank(
    make: Callable[..., WeightSyncTrainerEngine], source: Any, sentence: str, rank: int
) -> None:
    with pytest.raises(InvalidError, match=sentence):
        make(source, rank=rank)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rank": -1}, "rank is -1"),
        ({"push": {"version": 3}}, "version is given for all steps"),
        ({"run_id": 7}, "run_id is 7; use a string"),
        ({"server": None}, "server is None; use a string"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(
    make: Callable[..., WeightSyncTrainerEngine], options: Any, sentence: str
) -> None:
    with pytest.raises(InvalidError, match=sentence):
        make(_Source(), **options)


def test_a_client_that_is_given_stays_open(client: Client, servicer: Servicer) -> None:
    about = WeightSyncTrainerInitInfo(client, rank=0)
    trainer = WeightSyncTrainerEngine.trainer_init(about, source=_Source())
    trainer.send_weights()
    trainer.shutdown()
    assert client.status().models[0].model == "policy"
    assert servicer.live == 1
