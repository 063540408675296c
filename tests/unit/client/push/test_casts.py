"""Pushes are cast to what the engine holds: in full, as deltas, in the background."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest
import torch

from weightsync.errors import WeightSyncError
from weightsync.model.digest import content_digest, tensor_digest
from weightsync_client import Client, Fallback, InvalidError, PushKind, Reason, UnavailableError
from weightsync_client.push import policy
from weightsync_client.push.push_request import NamedBase

Tensors = dict[str, torch.Tensor]
_SHAPE = (300, 41)


def masters(seed: int = 0) -> Tensors:
    """Return what a trainer holds: float32, and an integer."""
    generator = torch.Generator().manual_seed(seed)
    names = ("embed", "layer.weight", "norm")
    found = {name: torch.randn(_SHAPE, generator=generator) for name in names}
    return found | {"steps": torch.arange(5)}


def step(tensors: Tensors, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in ("embed", "layer.weight", "norm"):
        chosen = torch.rand(_SHAPE, generator=generator) < 0.01
        tensors[name] += chosen * 0.5


def held(dtype: str = "BF16") -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return what the engine holds: a norm of another dtype, and one tensor more."""
    kinds = dict.fromkeys(("embed", "layer.weight"), (dtype, _SHAPE))
    return kinds | {"norm": ("F32", _SHAPE), "steps": ("I64", (5,)), "more": (dtype, (3,))}


def digest_of(tensors: Tensors, dtype: str = "BF16") -> str:
    lines = []
    for name, tensor in tensors.items():
        cast = tensor
        if name in ("embed", "layer.weight"):
            cast = tensor.to({"BF16": torch.bfloat16, "F16": torch.float16}[dtype])
        kind = {torch.float32: "F32", torch.int64: "I64"}.get(cast.dtype, dtype)
        data = cast.contiguous().view(torch.uint8).numpy().data
        lines.append((name, kind, tuple(cast.shape), tensor_digest(data)))
    return content_digest(lines)


def asked(servicer: Any) -> list[Any]:
    return [r for r in servicer.requests if type(r).__name__ == "GetEngineLayoutRequest"]


def commits(servicer: Any) -> list[int]:
    requests = [r for r in servicer.requests if type(r).__name__ == "CommitPushRequest"]
    return [request.cast_tensors for request in requests]


def test_each_tensor_becomes_what_the_engine_has_and_deltas_are_made_of_that(
    client: Client, servicer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    servicer.layout = held()
    tensors = masters()
    with caplog.at_level(logging.INFO, "weightsync_client"):
        first = client.push(tensors)
        assert (first.kind, first.cast) == (PushKind.FULL, 2)
        assert first.content_digest == digest_of(tensors)
        for number in range(2, 4):
            step(tensors, number)
            result = client.push(tensors)
            assert (result.kind, result.cast, result.version) == (PushKind.DELTA, 2, number)
            assert result.content_digest == digest_of(tensors)
            assert result.sent_bytes < 0.2 * first.sent_bytes
    (told,) = [record.getMessage() for record in caplog.records if "cast" in record.message]
    assert "2 tensors, such as tensor 'embed' from F32 to BF16" in told
    # The tensors of the engine are told once, in pages.
    known = [request.known_signature for request in asked(servicer)]
    assert known[:3] == ["", "", ""]
    assert len(set(known[3:])) == 1
    assert len(known) == 5
    assert commits(servicer) == [2, 2, 2]


def test_a_change_below_the_engine_s_precision_is_none(client: Client, servicer: Any) -> None:
    servicer.layout = held()
    tensors = masters()
    first = client.push(tensors)
    tensors["embed"] *= 1 + 2**-20
    second = client.push({**tensors, "embed": tensors["embed"].bfloat16().float()})
    assert second.kind is PushKind.DELTA
    assert second.content_digest == first.content_digest or (second.changed_fraction or 0) < 0.01


@pytest.mark.parametrize("form", ["iterable", "background", "keeps no copy"])
def test_every_way_of_pushing_casts(client: Client, servicer: Any, form: str) -> None:
    servicer.layout = held()
    tensors = masters()
    for number in range(2):
        if form == "iterable":
            result = client.push(iter(tensors.items()))
        elif form == "background":
            result = client.push_async(tensors).committed.result()
        else:
            result = client.push(tensors, delta="never")
        assert (result.cast, result.content_digest) == (2, digest_of(tensors)), number
        step(tensors, number)


def test_an_engine_of_another_dtype_takes_over(client: Client, servicer: Any) -> None:
    servicer.layout = held()
    tensors = masters()
    client.push(tensors)
    step(tensors, 1)
    # Away: as it was.
    servicer.layout = {}
    assert client.push(tensors).content_digest == digest_of(tensors)
    servicer.layout = held("F16")
    step(tensors, 2)
    result = client.push(tensors)
    assert result.content_digest == digest_of(tensors, "F16")
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.LAYOUT_CHANGED)
    step(tensors, 3)
    result = client.push(tensors)
    assert result.content_digest == digest_of(tensors, "F16")
    assert result.kind is PushKind.DELTA


@pytest.mark.parametrize("layout", [None, {}])
def test_of_an_engine_that_nobody_knows_all_goes_as_it_is(
    client: Client, servicer: Any, layout: Any
) -> None:
    servicer.layout = layout
    tensors = {name: tensor for name, tensor in masters().items() if name != "steps"}
    assert client.push(tensors).cast == 0
    client.push(tensors, dtype="exact")
    assert client.push(tensors, delta="never").dense_bytes > 4 * 3 * 300 * 41


def test_exact_refuses_before_anything_is_begun(client: Client, servicer: Any) -> None:
    servicer.layout = held()
    for source in (masters(), list(masters().items())):
        with pytest.raises(InvalidError, match="convert tensor 'embed' to BF16"):
            client.push(source, dtype="exact")
    with pytest.raises(InvalidError, match="convert tensor 'embed' to BF16"):
        client.push(iter(masters().items()), dtype="exact")
    assert not any(upload.commit for upload in servicer.uploads.values())
    kept = client.push(masters(), dtype="keep")
    assert kept.cast == 0
    assert kept.content_digest != digest_of(masters())


def test_wrong_options_are_refused(client: Client) -> None:
    options: list[dict[str, Any]] = [{"dtype": "bf16"}, {"check_finite": "yes"}]
    for wrong in options:
        with pytest.raises(InvalidError, match=next(iter(wrong))):
            client.push(masters(), **wrong)


def test_a_break_of_the_question_is_got_over(
    client: Client, servicer: Any, status_error: Any
) -> None:
    servicer.layout = held()
    left = 7

    def broken(method: str, _: Any) -> None:
        nonlocal left
        if method == "GetEngineLayout" and left:
            left -= 1
            raise status_error(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    servicer.before = broken
    tensors = masters()
    assert client.push(tensors).content_digest == digest_of(tensors)
    left = 1 << 30
    with pytest.raises(UnavailableError):
        client.push(tensors)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("form", ["state dict", "iterable"])
def test_a_value_beyond_the_range_leaves_no_version(
    client: Client, servicer: Any, form: str, *, delta: bool
) -> None:
    servicer.layout = held("F16")
    tensors = masters()
    if delta:
        client.push(tensors)
    made = len([upload for upload in servicer.uploads.values() if upload.commit])
    tensors["layer.weight"][3, 1] = 1e5
    source: Any = tensors if form == "state dict" else iter(tensors.items())
    with pytest.raises(InvalidError, match="values of tensor 'layer") as caught:
        client.push(source)
    assert caught.value.reason is Reason.REQUEST_INVALID
    assert "within the range of F16, which the engine has" in caught.value.message
    assert "element 124 is 100000" in caught.value.message
    assert len([upload for upload in servicer.uploads.values() if upload.commit]) == made
    tensors["layer.weight"][3, 1] = 1.0
    assert client.push(tensors).content_digest == digest_of(tensors, "F16")


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("form", ["state dict", "iterable"])
def test_check_finite_leaves_no_version(
    client: Client, servicer: Any, form: str, *, delta: bool
) -> None:
    tensors = masters()
    if delta:
        client.push(tensors, check_finite=True)
    tensors["norm"][1, 0] = float("nan")
    source: Any = tensors if form == "state dict" else iter(tensors.items())
    with pytest.raises(InvalidError, match="element 41 of tensor 'norm' is NaN or infinite"):
        client.push(source, check_finite=True)
    committed = [upload for upload in servicer.uploads.values() if upload.commit]
    assert len(committed) == delta
    client.push(tensors)


def test_what_is_held_is_cast_as_well(client: Client, servicer: Any) -> None:
    servicer.layout = held()
    tensors = masters()
    pushed = client.push(tensors, delta="never")
    assert client.hold(tensors).version == pushed.version
    step(tensors, 1)
    assert client.push(tensors).kind is PushKind.DELTA


def test_a_part_is_cast(client: Client, servicer: Any) -> None:
    servicer.layout = held()
    tensors = masters()
    client.push(tensors, delta="never")
    tensors["embed"] *= 2
    result = client.push({"embed": tensors["embed"]}, partial=True)
    assert (result.cast, result.content_digest) == (1, digest_of(tensors))


@pytest.mark.parametrize("was", [{}, held("F16")])
@pytest.mark.parametrize("ready", [True, False])
def test_processes_that_asked_before_and_after_an_engine_was_ready_are_told_to_push_again(
    client: Client, servicer: Any, was: Any, *, ready: bool
) -> None:
    servicer.layout = was

    def refuse(method: str, _request: Any) -> None:
        if method == "BeginPush":
            # Another process has come, and the engine just before it.
            servicer.layout = held() if ready else was
            raise WeightSyncError(Reason.LAYOUT_INVALID, "writer 1 tells 5 as total_bytes")

    servicer.before = refuse
    with pytest.raises(InvalidError) as caught:
        client.push(masters(), writers=2, writer=0, idempotency_key="k")
    told = caught.value.message
    assert told.startswith("push again: the engine, or another one, became ready") == ready
    assert "writer 1 tells 5 as total_bytes" in told
    if ready:
        sent = "F16" if was else "F32"
        assert f"tensor 'embed' was sent as {sent} and is BF16 there" in told


@pytest.mark.parametrize("rejected", [True, False])
def test_processes_that_chose_a_base_before_and_after_its_rejection_are_told_to_push_again(
    client: Client, servicer: Any, monkeypatch: pytest.MonkeyPatch, *, rejected: bool
) -> None:
    servicer.layout = held()
    client.push(masters(), delta="never")
    chosen = iter([NamedBase(1, "d"), NamedBase(0, "") if rejected else NamedBase(1, "d")])
    monkeypatch.setattr(policy, "named_base", lambda *_: next(chosen))

    def refuse(method: str, _request: Any) -> None:
        if method == "BeginPush":
            raise WeightSyncError(Reason.LAYOUT_INVALID, "writer 1 keeps the other tensors of")

    servicer.before = refuse
    with pytest.raises(InvalidError) as caught:
        client.push(masters(), partial=True, writers=2, writer=0, idempotency_key="k")
    told = caught.value.message
    assert told.startswith("push again: version 1 was rejected after") == rejected
    assert "writer 1 keeps the other tensors of" in told


def test_all_layouts_come_before_the_first_byte(client: Client, servicer: Any) -> None:
    described: list[int] = []

    def note(_: Any) -> None:
        (upload,) = servicer.uploads.values()
        described.append(sum(bool(shard.tensors) for shard in upload.shards.values()))

    servicer.chunk = note
    tensors = masters()
    client.push(tensors, shard_bytes=1000, chunk_bytes=1 << 20)
    assert described == [len(tensors)] * len(tensors)
