"""Memory is borrowed ahead and given back meanwhile, by one thread, in order."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.same_host import WriteLease
from weightsync_client.source.shards import tensor_shard
from weightsync_client.transport.shm_writer import LeaseRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from weightsync_client.source.shards import Shard


class Counter:
    """A borrower that notes what it is asked; `gate` holds its answers back."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.refused: str | None = None

    def take_lease(self, shard: int) -> WriteLease:
        return WriteLease(self._answer("lend", shard), huge=False)

    def written(self, shard: int, _digests: Sequence[bytes]) -> None:
        self._answer("written", shard)

    def give_back(self, lent: WriteLease) -> None:
        self.asked.append(f"back {lent.fd}")

    def _answer(self, op: str, shard: int) -> int:
        assert self.gate.wait(10)
        self.asked.append(f"{op} {shard}")
        if self.refused is not None:
            if self.refused != f"{op} {shard}":
                raise ConnectionError
            raise WeightSyncError(Reason.WRITER_LEFT, "somebody writes")
        return shard


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def begin(counter: Counter) -> Iterator[Callable[..., tuple[LeaseRequests, list[BaseException]]]]:
    begun: list[LeaseRequests] = []

    def begin(count: int, ahead: int) -> tuple[LeaseRequests, list[BaseException]]:
        errors: list[BaseException] = []
        shards: Iterator[Shard] = (tensor_shard([], i, str(i)) for i in range(count))
        begun.append(LeaseRequests(cast("Any", counter), shards, ahead, errors.append))
        return begun[-1], errors

    yield begin
    counter.gate.set()
    for errands in begun:
        errands.close()


def taken(errands: LeaseRequests) -> Shard:
    found = errands.next()
    assert found is not None
    shard, lent = found
    assert shard.index == lent.fd
    return shard


def drain(errands: LeaseRequests) -> None:
    while errands.next() is not None:
        pass


def test_every_shard_comes_once_and_in_order(
    counter: Counter, begin: Callable[..., tuple[LeaseRequests, list[BaseException]]]
) -> None:
    errands, errors = begin(5, 2)
    told: list[int] = []
    while (found := errands.next()) is not None:
        shard = found[0]
        errands.written(shard, [], lambda: told.append(len(told)))
    errands.finish()
    assert told == [0, 1, 2, 3, 4]
    assert [name for name in counter.asked if name.startswith("lend")] == [
        f"lend {i}" for i in range(5)
    ]
    assert sorted(counter.asked)[5:] == [f"written {i}" for i in range(5)]
    assert errors == []


def test_who_writes_does_not_wait_for_the_answer(
    counter: Counter, begin: Callable[..., tuple[LeaseRequests, list[BaseException]]]
) -> None:
    errands, _ = begin(3, 2)
    first = taken(errands)
    assert taken(errands).index == 1
    counter.gate.clear()
    told = threading.Event()
    errands.written(first, [], told.set)
    assert not told.is_set()
    counter.gate.set()
    errands.finish()
    assert told.is_set()


def test_the_first_refusal_is_what_is_told(
    counter: Counter, begin: Callable[..., tuple[LeaseRequests, list[BaseException]]]
) -> None:
    errands, errors = begin(9, 2)
    first = taken(errands)
    assert taken(errands).index == 1
    counter.refused = "written 0"
    errands.written(first, [], lambda: None)
    # Borrowed before the refusal; those after it find the connection ended.
    with pytest.raises(ConnectionError):
        drain(errands)
    assert [type(error) for error in errors] == [WeightSyncError]


def test_what_nobody_wrote_to_is_given_back(
    counter: Counter, begin: Callable[..., tuple[LeaseRequests, list[BaseException]]]
) -> None:
    errands, _ = begin(9, 3)
    assert taken(errands).index == 0
    errands.close()
    # Some may not have been borrowed any more.
    borrowed = {name[5:] for name in counter.asked if name.startswith("lend")}
    back = {name[5:] for name in counter.asked if name.startswith("back")}
    assert back == borrowed - {"0"}
    errands.close()


def test_nothing_is_begun_after_the_end(
    counter: Counter, begin: Callable[..., tuple[LeaseRequests, list[BaseException]]]
) -> None:
    errands, errors = begin(4, 3)
    errands.close()
    asked = list(counter.asked)
    assert errands.next() is None
    errands.written(tensor_shard([], 7, "7"), [], lambda: None)
    assert counter.asked == asked
    assert errors == []
