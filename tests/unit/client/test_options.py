"""What a caller may say, what is refused before it is sent, and what is said again."""

from __future__ import annotations

import inspect
from typing import Any

import grpc
import numpy as np
import pytest

from weightsync.errors import WeightSyncError
from weightsync_client import (
    AsyncClient,
    Client,
    DeadlineError,
    InvalidError,
    Reason,
    Retry,
    UnavailableError,
)

TENSORS = {"t": np.arange(4, dtype=np.float32)}

MISSPELT = [
    ("push", (TENSORS,), "same_hosts", "same_host"),
    ("push", (TENSORS,), "idempotencykey", "idempotency_key"),
    ("push_async", (TENSORS,), "meta_data", "metadata"),
    ("apply", (1,), "dryrun", "dry_run"),
    ("apply", (1,), "Pause", "pause"),
    ("rollback", ("why",), "timeout", "timeout_s"),
]
# Options of other methods, like which there is none.
FOREIGN = [("rollback", ("why",), "dry_run"), ("push", (TENSORS,), "clear_rejected")]
CASES = [*MISSPELT, *((*case, "") for case in FOREIGN)]


async def call(client: Client | AsyncClient, method: str, *arguments: Any, **options: Any) -> Any:
    answer = getattr(client, method)(*arguments, **options)
    return await answer if inspect.isawaitable(answer) else answer


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(("method", "arguments", "wrong", "meant"), CASES)
async def test_options_that_do_not_exist_are_refused(
    running: Any, kind: Any, method: str, arguments: Any, wrong: str, meant: str
) -> None:
    client = kind(running.address)
    hint = f". Did you mean {meant!r}?" if meant else ""
    try:
        with pytest.raises(TypeError) as refused:
            await call(client, method, *arguments, **{wrong: True})
        sentence = f"{method}() got an unexpected keyword argument {wrong!r}{hint}"
        assert str(refused.value) == sentence
        assert not running.servicer.calls
    finally:
        await call(client, "close")


BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("push", (TENSORS,), {"metadata": {"step": [5]}}, "metadata['step'] is [5]; use a string or a"),
    ("push", (TENSORS,), {"metadata": {"last": True}}, "metadata['last'] is True; use a string or"),
    ("push", (TENSORS,), {"metadata": {5: "step"}}, "a key of metadata is 5; use a string"),
    ("push", (TENSORS,), {"metadata": "step"}, "metadata is 'step'; use a dict of strings"),
    ("push", (TENSORS,), {"metadata": {"a": "\ud800"}}, "metadata['a'] is '\\ud800'; use Unicode"),
    ("push", (TENSORS,), {"version": -1}, "version is -1; use a whole number from 0 to 2^53-1"),
    ("push", (TENSORS,), {"version": "3"}, "version is '3'; use a whole number from 0"),
    ("push", (TENSORS,), {"epoch": 1.5}, "epoch is 1.5; use a whole number from 0"),
    ("push", (TENSORS,), {"streams": "2"}, "streams is '2'; use a whole number from 1"),
    ("push", (TENSORS,), {"shard_bytes": "1"}, "shard_bytes is '1'; use a whole number from 1"),
    ("push", (TENSORS,), {"idempotency_key": 7}, "idempotency_key is 7; use a string"),
    ("push", ({3: TENSORS["t"]},), {}, "the name of a tensor is 3; use a string"),
    ("push", ([(b"t", TENSORS["t"])],), {}, "the name of a tensor is b't'; use a string"),
    ("push_async", (TENSORS,), {"version": 1 << 53}, "version is 9007199254740992; use a whole"),
    ("apply", (-1,), {}, "version is -1; use a whole number"),
    ("apply", ("3",), {}, "version is '3'; use a whole number"),
    ("apply", (True,), {}, "version is True; use a whole number"),
    ("apply", (1,), {"dry_run": "no"}, "dry_run is 'no'; use True or False"),
    ("apply", (1,), {"require_durable": 1}, "require_durable is 1; use True or False"),
    ("apply", (1,), {"wait_timeout_s": "3"}, "wait_timeout_s is '3'; use seconds"),
    ("apply", (1,), {"prepare_timeout_s": -3}, "prepare_timeout_s is -3; use seconds"),
    ("apply", (1,), {"timeout_s": float("nan")}, "timeout_s is nan; use seconds"),
    ("rollback", (5,), {}, "reason is 5; use a string"),
    ("verify", (-1,), {}, "version is -1; use a whole number"),
    ("get_version", (-1,), {}, "version is -1; use a whole number"),
    ("get_version", ("3",), {}, "version is '3'; use a whole number"),
    ("pin", (None,), {}, "version is None; use a whole number"),
    ("delete", (2.0,), {}, "version is 2.0; use a whole number"),
    ("pull", ("/nowhere/out", "3"), {}, "version is '3'; use a whole number"),
]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(("method", "arguments", "options", "sentence"), BAD)
async def test_bad_values_are_refused_in_a_sentence(
    running: Any, kind: Any, method: str, arguments: Any, options: Any, sentence: str
) -> None:
    client = kind(running.address, model="policy")
    try:
        with pytest.raises(InvalidError) as refused:
            await call(client, method, *arguments, **options)
        assert refused.value.reason is Reason.REQUEST_INVALID
        assert refused.value.message.startswith(sentence)
        # An iterable is read once there is a push for it; nothing of the push is left.
        assert set(running.servicer.calls) <= {"BeginPush", "AbortPush"}
        assert all(upload.aborted for upload in running.servicer.uploads.values())
    finally:
        await call(client, "close")


def test_numbers_are_taken_for_text_and_for_versions(client: Client) -> None:
    facts = {"step": 5, "loss": 0.25, "lr": np.float32(0.5), "seed": np.int64(7), "run_id": 3}
    pushed = client.push(TENSORS, version=np.int64(4), metadata=facts)  # type: ignore[arg-type] # as trainers have them
    assert pushed.version == 4
    kept = {"step": "5", "loss": "0.25", "lr": "0.5", "seed": "7", "run_id": "3"}
    assert client.get_version(np.uint64(4)).metadata == kept  # type: ignore[arg-type] # as above
    # The run is known again by its number.
    changed = {"t": TENSORS["t"] + np.eye(4, dtype=np.float32)[3]}
    assert client.push(changed, metadata={"run_id": 3}).version == 5


# Where the link breaks, every call is sent five times.
_SENT = 5


def failing(servicer: Any, method: str, times: int, error: Exception) -> list[str]:
    """Have a method fail so many times; returns the keys of its calls, as they come."""
    keys: list[str] = []

    def before(called: str, request: Any) -> None:
        if called == method:
            keys.append(request.idempotency_key)
            if len(keys) <= times:
                raise error

    servicer.before = before
    return keys


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("method", ["apply", "rollback"])
async def test_an_apply_outlasts_a_restart_of_the_server(
    client: Client,
    servicer: Any,
    status_error: Any,
    retry: Retry,
    kind: Any,
    method: str,
    code: grpc.StatusCode,
) -> None:
    client.push(TENSORS)
    client.push({"t": TENSORS["t"] + 1})
    client.apply(2)
    away = status_error(code, "Connection refused")
    rpc = "ApplyVersion" if method == "apply" else "Rollback"
    keys = failing(servicer, rpc, 2 * _SENT + 1, away)
    other = kind(client._link.address, retry=retry)
    try:
        await call(other, method, *((1,) if method == "apply" else ()))
    finally:
        await call(other, "close")
    assert servicer.live == 1
    assert len(keys) == 2 * _SENT + 2
    assert len(set(keys)) == 1


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(("attempts", "timeout_s"), [(2, 60), (1000, 0.5)])
async def test_an_apply_is_given_up(
    running: Any, status_error: Any, kind: Any, attempts: int, timeout_s: float
) -> None:
    away = status_error(grpc.StatusCode.UNAVAILABLE, "Connection refused")
    keys = failing(running.servicer, "ApplyVersion", 1000, away)
    retry = Retry(attempts=attempts, initial_s=0.01, max_s=0.05)
    client = kind(running.address, model="policy", retry=retry)
    try:
        with pytest.raises((UnavailableError, DeadlineError)):
            await call(client, "apply", 1, timeout_s=timeout_s)
    finally:
        await call(client, "close")
    assert len(keys) <= attempts * _SENT


def test_what_the_server_answers_ends_an_apply(client: Client, servicer: Any) -> None:
    gone = WeightSyncError(Reason.ENGINE_AWAY, "the engine is gone; start it")
    keys = failing(servicer, "ApplyVersion", 1000, gone)
    with pytest.raises(UnavailableError, match="the engine is gone") as told:
        client.apply(1)
    assert told.value.reason is Reason.ENGINE_AWAY
    assert len(keys) == 1
