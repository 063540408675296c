"""A rank alone: what it tells of a step, what it hands over, and what ends its wait."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightsync.vllm.extensions.received.update_receiver import UpdateReceiver
from weightsync.vllm.worker.rank_job import RefusedCallError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from weightsync.vllm.extensions.received.update_file import UpdateSink

_INFO: dict[str, Any] = {"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[2]] * 2}


class _Group:
    """A communicator whose broadcasts are the test's; the real one has as much."""

    def __init__(self) -> None:
        self.freed = threading.Event()
        self.broadcast: Callable[..., None] = self._wait

    def _wait(self, tensor: torch.Tensor) -> None:
        del tensor
        # A communicator that is freed lets go of who waits, with anything in the tensor.
        assert self.freed.wait(10)


class _Wire:
    def __init__(self, sink: UpdateSink) -> None:
        self.model = sink
        self.model_update_group = _Group()
        self.receive: Callable[[], None] = self._broadcast

    def parse_init_info(self, info: Any) -> Any:
        return info

    parse_update_info = parse_init_info

    def init_transfer_engine(self, info: Any) -> None:
        del info

    def receive_weights(self, info: Any) -> None:
        del info
        self.receive()

    def _broadcast(self) -> None:
        for name in _INFO["names"]:
            tensor = torch.zeros(2)
            self.model_update_group.broadcast(tensor)
            self.model.load_weights([(name, tensor)])

    def shutdown(self) -> None:
        self.model_update_group.freed.set()


class _Rank:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.receiver = UpdateReceiver(self, keeps=True)
        self.call(step="open", info={})
        self.wait()

    def make_wire(self, sink: UpdateSink) -> Any:
        self.wire = _Wire(sink)
        return self.wire

    def close_wire(self, wire: Any) -> None:
        wire.shutdown()

    def end_update(self, wire: Any) -> None:
        pass

    def own_update(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return dict(info)

    def call(self, **args: Any) -> dict[str, Any]:
        return self.receiver.call(args)

    def wait(self) -> dict[str, Any]:
        for _ in range(500):
            report = self.call(step="poll")
            if not report["running"]:
                return report
            time.sleep(0.01)
        pytest.fail("the step does not end")

    def begin(self, limit_s: float = 60) -> UpdateSink:
        self.call(step="check", info=_INFO)
        self.call(step="reserve")
        self.wait()
        self.call(step="receive", limit_s=limit_s)
        return self.receiver._sink


@pytest.fixture
def rank() -> Iterator[_Rank]:
    made = _Rank()
    yield made
    made.call(step="leave")
    made.receiver._sink.close()


class _EndsWhenAsked:
    """A step that fails while its rank is asked how it is."""

    over = False
    _error = ""

    @property
    def error(self) -> str:
        known, self._error, self.over = self._error, "broken", True
        return known

    def leave(self) -> bool:
        return True


def test_a_step_that_fails_while_it_is_reported_is_not_reported_as_well(rank: _Rank) -> None:
    rank.receiver._step = _EndsWhenAsked()  # type: ignore[assignment] # as much as is asked of it
    report = rank.call(step="poll")
    assert report["running"] or report["raised"]
    report = rank.call(step="poll")
    assert (report["running"], report["raised"]) == (False, True)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_what_broke_off_is_not_handed_over(rank: _Rank, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    rank.wire.receive = fail
    sink = rank.begin()
    assert rank.wait()["raised"]
    assert error.__name__ in sink.failure
    with pytest.raises(RefusedCallError, match=error.__name__):
        rank.call(step="offer", socket="/nowhere", offer="o")


def test_what_did_not_come_is_not_handed_over(rank: _Rank) -> None:
    # However it came to that.
    rank.receiver._sink.begin([("a", torch.float32, (2,))])
    with pytest.raises(RefusedCallError, match="not all announced tensors arrived"):
        rank.call(step="offer", socket="/nowhere", offer="o")
    rank.receiver._sink.load_weights([("a", torch.zeros(2))])
    rank.receiver._step = SimpleNamespace(error="broken", over=True)  # type: ignore[assignment] # as above
    with pytest.raises(RefusedCallError, match="broken"):
        rank.call(step="offer", socket="/nowhere", offer="o")
    rank.receiver._step = None


def test_nobody_has_to_ask_a_rank_to_give_a_trainer_up(rank: _Rank) -> None:
    sink = rank.begin(limit_s=0.2)
    assert rank.wire.model_update_group.freed.wait(10)
    report = rank.wait()
    assert report["raised"]
    assert not report["open"]
    # What a communicator leaves that is freed is no tensor of the trainer.
    assert sink.arrived == 0


class _Queued(torch.Tensor):
    """On a device as far as can be seen: its broadcast is only queued when it is handed over."""

    is_cuda = property(lambda _: True)


def test_what_is_queued_when_a_trainer_is_given_up_has_not_come(
    rank: _Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, wire = rank.wire.model_update_group, rank.wire
    stream = SimpleNamespace(synchronize=lambda: group.freed.wait(10))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)

    def receive() -> None:
        wire.model.load_weights(
            (name, torch.zeros(2).as_subclass(_Queued)) for name in _INFO["names"]
        )

    wire.receive = receive
    sink = rank.begin(limit_s=0.2)
    report = rank.wait()
    assert (report["raised"], report["open"]) == (True, False)
    assert (sink.arrived, sink.whole) == (0, False)


def test_a_trainer_that_goes_on_is_not_given_up(rank: _Rank) -> None:
    def slowly() -> None:
        for name in _INFO["names"]:
            time.sleep(0.3)
            rank.wire.model.load_weights([(name, torch.zeros(2))])

    rank.wire.receive = slowly
    rank.begin(limit_s=0.5)
    report = rank.wait()
    assert (report["raised"], report["failure"], report["arrived"]) == (False, "", 2)
    assert report["open"]


def test_nothing_is_begun_on_a_connection_that_ends(rank: _Rank) -> None:
    wire, closes = rank.wire, threading.Event()
    shutdown = wire.shutdown

    def slowly() -> None:
        closes.wait(10)
        shutdown()

    wire.shutdown = slowly  # type: ignore[method-assign] # takes longer
    sink = rank.begin()
    rank.call(step="leave")
    try:
        with pytest.raises(RuntimeError, match="was ended"):
            wire.model_update_group.broadcast(torch.zeros(2), src=0)
        with pytest.raises(RuntimeError, match="was dropped"):
            sink.load_weights([("a", torch.zeros(2))])
    finally:
        closes.set()
