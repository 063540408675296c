from __future__ import annotations

from dataclasses import dataclass

import pytest

from weightsync_server.catalog.version_events import EventBus


@dataclass(frozen=True)
class _Came:
    number: int


@dataclass(frozen=True)
class _Went:
    number: int


def test_handlers_are_called_in_their_order_and_of_their_kind_alone() -> None:
    bus, seen = EventBus(), list[object]()
    bus.on(_Came, lambda event: seen.append(("first", event)))
    bus.on(_Came, lambda event: seen.append(("second", event)))
    bus.on(_Went, lambda event: seen.append(("other", event)))
    bus.publish(_Came(1))
    assert seen == [("first", _Came(1)), ("second", _Came(1))]


def test_what_a_handler_publishes_is_handled_before_the_next_handler() -> None:
    bus, seen = EventBus(), list[object]()
    bus.on(_Came, lambda event: bus.publish(_Went(event.number)))
    bus.on(_Came, seen.append)
    bus.on(_Went, seen.append)
    bus.publish(_Came(2))
    assert seen == [_Went(2), _Came(2)]


def test_a_function_that_subscribed_twice_leaves_once() -> None:
    bus, seen = EventBus(), list[object]()
    bus.on(_Came, seen.append)
    bus.on(_Came, seen.append)
    bus.off(_Came, seen.append)
    bus.publish(_Came(3))
    assert seen == [_Came(3)]


def test_a_handler_that_left_meanwhile_is_not_called() -> None:
    bus, seen = EventBus(), list[object]()
    bus.on(_Came, lambda _: bus.off(_Came, seen.append))
    bus.on(_Came, seen.append)
    bus.publish(_Came(4))
    assert seen == []


def test_what_a_handler_raises_reaches_the_publisher() -> None:
    bus = EventBus()
    bus.on(_Came, lambda event: [event][event.number])
    with pytest.raises(IndexError):
        bus.publish(_Came(5))


def test_a_handler_that_is_named_leaves() -> None:
    bus, seen = EventBus(), list[object]()
    bus.on(_Came, seen.append)
    bus.on(_Went, seen.append)
    bus.off(_Came, seen.append)
    bus.off(_Came, seen.append)
    bus.publish(_Came(6))
    bus.publish(_Went(6))
    assert seen == [_Went(6)]
