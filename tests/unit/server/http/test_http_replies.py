from __future__ import annotations

import json

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.http.http_messages import read_fields, refusal
from weightsync_server.http.http_server import HttpRequest

#: What the caller has to change; everything else may be good a moment later.
_CALLERS = {
    *(Reason.REQUEST_INVALID, Reason.LAYOUT_INVALID, Reason.SHARD_INVALID),
    *(Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED, Reason.ENGINE_REFUSED),
    *(Reason.VERSION_REJECTED, Reason.VERSION_BELOW_LIVE, Reason.EPOCH_STALE),
}
_PASSING = {
    *(Reason.ENGINE_AWAY, Reason.ENGINE_FENCED, Reason.ENGINE_ASLEEP, Reason.NO_SLOT),
    *(Reason.MEMORY_EXHAUSTED, Reason.DISK_EXHAUSTED, Reason.LIMIT_EXCEEDED, Reason.FAULT),
    *(Reason.SHUTTING_DOWN, Reason.DEADLINE_EXCEEDED),
}


@pytest.mark.parametrize("reason", Reason)
def test_every_refusal_is_a_sentence_with_its_name(reason: Reason) -> None:
    reply = refusal(WeightSyncError(reason, 'do "this"\r\nX: y'))
    assert 400 <= reply.status <= 504
    assert reply.kind == "application/json"
    assert json.loads(reply.body) == {"error": 'do "this"\r\nX: y', "reason": reason.value}
    if reason in _CALLERS:
        assert reply.status < 500
    if reason in _PASSING:
        assert reply.status in (503, 504)


@pytest.mark.parametrize(("seconds", "written"), [(0.01, "1"), (1.0, "1"), (1.2, "2")])
def test_when_to_come_again(seconds: float, written: str) -> None:
    reply = refusal(WeightSyncError(Reason.NO_SLOT, "x", retry_after_s=seconds))
    assert dict(reply.headers) == {"Retry-After": written}


def test_who_proves_nothing_is_asked_for_a_token() -> None:
    reply = refusal(WeightSyncError(Reason.UNAUTHENTICATED, "x"))
    assert (reply.status, dict(reply.headers)) == (401, {"WWW-Authenticate": "Bearer"})


def test_what_a_trainer_s_class_has_raised_is_shown() -> None:
    facts = {"traceback": "Traceback ...", "version": "7", "address": "not for them"}
    reply = refusal(WeightSyncError(Reason.TRAINER_FAILED, "x", metadata=facts))
    assert reply.status == 409
    assert json.loads(reply.body) == {
        "error": "x",
        "reason": "TRAINER_FAILED",
        "traceback": "Traceback ...",
        "version": "7",
    }


@pytest.mark.parametrize(
    "body",
    [rb'{"a": "\ud800"}', rb'{"\udfff": 1}', rb'{"a": [{"b": "x\ud83dx"}]}', b'{"a": "\xff"}'],
)
def test_half_a_character_is_refused_as_no_text(body: bytes) -> None:
    with pytest.raises(WeightSyncError, match="one JSON object in UTF-8") as caught:
        read_fields(HttpRequest("POST", "/x", body=body), may_be_empty=True)
    assert caught.value.reason is Reason.REQUEST_INVALID
    whole = HttpRequest("POST", "/x", body=rb'{"a": "\ud83d\ude00"}')
    assert read_fields(whole, may_be_empty=True) == {"a": "\U0001f600"}
