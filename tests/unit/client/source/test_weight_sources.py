"""What vLLM's trainers hand over is pushed as it is, and by every rank to its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from weightsync.errors import Reason, WeightSyncError
from weightsync_client import Client, ClientError, Declared, InvalidError, Retry, Timeouts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


class _Source(WeightSource):  # type: ignore[misc]  # vLLM's types are Any here
    """Counts what was asked of it."""

    def __init__(self, count: int = 4, names: Collection[str] | None = None) -> None:
        self.tensors = {f"layers.{i}.weight": torch.full((1000,), float(i)) for i in range(count)}
        self.names = names
        self.given = 0

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def held_names(self) -> Collection[str] | None:
        return self.names

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self.tensors.items():
            self.given += 1
            yield pair


def _gather(source: _Source) -> Iterator[tuple[str, torch.Tensor]]:
    """As a generator that knows nothing of vLLM."""
    yield from source


def test_a_source_is_pushed(client: Client) -> None:
    for source in (_Source(), _Source(names=_Source().tensors.keys())):
        pushed = client.push(source, delta="never")
        assert pushed.tensor_count == source.given == 4


def test_what_other_ranks_have_is_not_left_out(client: Client) -> None:
    source = _Source(names=["layers.1.weight", "layers.3.weight"])
    with pytest.raises(InvalidError, match=r"lacks 2 of the 4 .* 'layers\.0\.weight'"):
        client.push(source)
    assert not source.given


@pytest.fixture(params=["BeginPush", "CommitPush"])
def refused(request: pytest.FixtureRequest, servicer: Any) -> str:
    """Has the server refuse one call of every push."""
    call: str = request.param

    def refuse(method: str, _request: Any) -> None:
        if method == call:
            raise WeightSyncError(Reason.DISK_EXHAUSTED, "the disk is full; free some")

    servicer.before = refuse
    return call


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("delta", ["never", "auto"])
@pytest.mark.parametrize("of_vllm", [True, False])
def test_it_is_read_to_its_end_when_the_push_fails(
    client: Client, delta: str, *, of_vllm: bool
) -> None:
    source = _Source()
    pushed = source if of_vllm else _gather(source)
    with pytest.raises(ClientError, match="disk is full"):
        client.push(pushed, collective=not of_vllm, delta=delta)
    assert source.given == 4


def test_others_are_not(client: Client, refused: str) -> None:
    source = _Source()
    with pytest.raises(ClientError, match="disk is full"):
        client.push(_gather(source), delta="never")
    assert (source.given < 4) is (refused == "BeginPush")


@pytest.mark.parametrize("options", [{"delta": "sometimes"}, {"shard_bytes": 0}, {"epoch": -1}])
def test_wrong_options_do_not_leave_ranks_waiting(client: Client, options: Any) -> None:
    source = _Source()
    with pytest.raises(InvalidError):
        client.push(source, **options)
    assert source.given == 4


def test_a_server_that_is_away_does_not_either() -> None:
    source = _Source()
    with (
        Client("127.0.0.1:1", retry=Retry(attempts=1), timeouts=Timeouts(call_s=1)) as client,
        pytest.raises(ClientError),
    ):
        client.push(source)
    assert source.given == 4


def test_a_cancelled_push_reads_on(client: Client) -> None:
    source = _Source(count=50)
    handle = client.push_async(_gather(source), collective=True, shard_bytes=4000)
    handle.cancel()
    with pytest.raises(ClientError):
        handle.committed.result(30)
    assert source.given == 50


def test_an_iterable_that_fails_at_its_end_hides_nothing(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(2)
        yield "a", torch.zeros(2)
        raise RuntimeError("a rank has died")

    with pytest.raises(InvalidError, match="'a' twice"):
        client.push(broken(), collective=True)
    assert "a rank has died" in caplog.text


# From vLLM 0.33 on.


class _NewWeightSource(ABC):
    """Of vllm-project/vllm v0.33.0 (4ba787ec9), vllm/distributed/weight_transfer/base.py."""

    @property
    @abstractmethod
    def metadata(self) -> list[Any]: ...

    def owned_names(self, rank: int) -> list[str]:
        return [m.name for m in self.metadata if m.owners is None or rank in m.owners]

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not _NewWeightSource.iter_full

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError


class _PartSource(_NewWeightSource):
    """Gives parts of tensors, by `iter_local`."""

    @cached_property
    def metadata(self) -> list[Any]:
        return [SimpleNamespace(name="a", dtype=torch.float32, shape=(4,), owners=None)]


class _FullSource(_NewWeightSource):
    """Counts what was asked of it, as `_Source` does."""

    def __init__(self, owners: dict[str, tuple[int, ...]] | None = None) -> None:
        self.tensors = {f"layers.{i}.weight": torch.full((1000,), float(i)) for i in range(4)}
        self.owners = owners or {}
        self.given = 0

    @cached_property
    def metadata(self) -> list[Any]:
        return [
            SimpleNamespace(
                name=name, dtype=t.dtype, shape=tuple(t.shape), owners=self.owners.get(name)
            )
            for name, t in self.tensors.items()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self.tensors.items():
            self.given += 1
            yield pair


@pytest.fixture
def _new_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.distributed.weight_transfer.base.WeightSource", _NewWeightSource)


@pytest.mark.usefixtures("_new_vllm")
def test_a_source_that_is_no_iterable_is_read_in_full(client: Client) -> None:
    for source in (_FullSource(), _FullSource({"layers.2.weight": (0, 3)})):
        pushed = client.push(source)
        found = {tensor.name: tensor.torch().clone() for tensor in client.tensors(pushed.version)}
        assert found.keys() == source.tensors.keys()
        assert all(torch.equal(found[name], source.tensors[name]) for name in found)
    declared = client.push(Declared(_FullSource(), source.metadata), delta="never")
    assert declared.content_digest == pushed.content_digest


@pytest.mark.usefixtures("_new_vllm")
@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (_FullSource({"layers.1.weight": (1, 2)}), r"rank 0 lacks 1 of the 4 .* 'layers\.1\.wei"),
        (_PartSource(), "gives parts of tensors only; push one with iter_full"),
    ],
)
def test_a_source_that_lacks_what_others_have_is_not_read(
    client: Client, source: Any, sentence: str
) -> None:
    with pytest.raises(InvalidError, match=sentence):
        client.push(source)
    assert not getattr(source, "given", 0)


@pytest.mark.usefixtures("refused", "_new_vllm")
def test_such_a_source_is_read_to_its_end_when_the_push_fails(client: Client) -> None:
    source = _FullSource()
    with pytest.raises(ClientError, match="disk is full"):
        client.push(source)
    assert source.given == 4
