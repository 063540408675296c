"""Attacks by bytes over the wire: names, layouts, contents, numbers. Each is refused with a status
of its own, the served version goes on being served, and nothing is left behind.

The parsers alone are attacked in tests/unit/model/test_layout.py and by tests/fuzz.
"""

from __future__ import annotations

import io
import pickle
import re
import shutil
import struct
import tempfile
import time
import urllib.request
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from tests.soak.contents import KINDS, MemoryContents
from tests.soak.site import MemoryEngineProcess
from tests.support.census import Census, same_again, settled
from tests.support.stock import push_messages
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.model.layout import build_header
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor

MODEL = "default"
CODE = grpc.StatusCode
_CONTENTS = MemoryContents()

#: A5 and A18: what a name must not do to a path, a log or a terminal.
_HOSTILE = {
    "traversal": "../../../tmp/owned",
    "absolute": "/etc/passwd",
    "backslash": "..\\..\\owned",
    "nul": "a\0b",
    "line": "x\n2026-01-01 00:00:00,000 ERROR INJECTED: all is lost",
    "escape": "\x1b[2Jx",
    "rtl": "\N{RIGHT-TO-LEFT OVERRIDE}x",
    "look-alike": "dеfault",  # noqa: RUF001 - that is the attack: the second letter is Cyrillic
    "format": "%s%n{0.__class__}${jndi:ldap://x}",
    "long": "x" * 1_000_000,
}


class Site:
    """A server that serves version 2 to an engine."""

    def __init__(self, root: Path) -> None:
        (root / "run").mkdir()
        self.root = root
        self.server = WeightSyncServer(root / "run", root / "state", flags=("--slots", "3"))
        self.engine = MemoryEngineProcess(root / "run")

    def start(self) -> None:
        """Push and apply version 2."""
        self.server.start()
        self.engine.start()
        self.server.wait_serving()
        stub = self.server.stub
        stub.PushWeights(push_messages(_CONTENTS.shards(1), 2), timeout=30)
        stub.ApplyVersion(pb.ApplyVersionRequest(model=MODEL, version=2), timeout=30)
        # One refused push, so that every slot, thread and page that is made late is there.
        with pytest.raises(grpc.RpcError):
            stub.PushWeights(push_messages(_CONTENTS.shards(9), 2), timeout=30)

    def refused(self, call: Any) -> tuple[grpc.StatusCode, Reason]:
        """Return code and reason of a call that must be refused, its sentence being fit to show."""
        with pytest.raises(grpc.RpcError) as caught:
            call()
        error: Any = caught.value
        told = from_call(error)
        assert told is not None, error
        assert error.details().isprintable(), ascii(error.details())
        assert len(error.details().encode()) <= 2000
        return error.code(), told.reason

    def push(self, messages: Any) -> tuple[grpc.StatusCode, Reason]:
        """Return code and reason of a push that must be refused."""
        return self.refused(lambda: self.server.stub.PushWeights(iter(messages), timeout=30))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    root = Path(tempfile.mkdtemp(prefix="ws-"))
    site = Site(root)
    try:
        site.start()
        yield site
    finally:
        site.server.stop()
        site.engine.stop()
        shutil.rmtree(root)


@pytest.fixture(autouse=True)
def untouched(site: Site) -> Iterator[None]:
    """The served version is served as before, and nothing is left behind."""
    take = partial(Census.take, site.server)
    before = settled(take)
    yield
    same_again(take, before)
    told = site.engine.told()
    assert told == {"generating": True, "content": _CONTENTS.digest(1), "leased": False}
    stub = site.server.stub
    assert stub.VerifyVersion(pb.VerifyVersionRequest(model=MODEL), timeout=30).verified


def _shard(tensors: dict[str, bytes] | None = None, kinds: Any = None) -> bytes:
    kinds, tensors = kinds or KINDS, tensors or _CONTENTS.tensors(5)
    header, _ = build_header((name, *kinds[name]) for name in tensors)
    return len(header).to_bytes(8, "little") + header + b"".join(tensors.values())


def _push(
    site: Site, data: bytes, layout: pb.LayoutPart, **begin: Any
) -> tuple[grpc.StatusCode, Reason]:
    """Push bytes under a layout that somebody made up."""
    request = pb.BeginPushRequest(model=MODEL, shard_count=1, **begin)
    messages = [
        pb.PushWeightsRequest(begin=request),
        pb.PushWeightsRequest(layout=layout),
        pb.PushWeightsRequest(chunk=pb.Chunk(data=data)),
        pb.PushWeightsRequest(commit=pb.CommitPushRequest()),
    ]
    return site.push(messages)


# Names in every field of every request: A5, A18.


def _text_fields(descriptor: Descriptor, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for field in descriptor.fields:
        if field.type == field.TYPE_STRING:
            yield (*path, field.name)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from _text_fields(field.message_type, (*path, field.name))


_METHODS = pb.DESCRIPTOR.services_by_name["WeightSync"].methods
_FIELDS = [
    (method, path)
    for method in _METHODS
    if not method.client_streaming
    for path in _text_fields(method.input_type)
]


_REFUSALS = (
    CODE.INVALID_ARGUMENT,
    CODE.NOT_FOUND,
    CODE.FAILED_PRECONDITION,
    CODE.OUT_OF_RANGE,
    # Calls of a fleet, of which this server is no member.
    CODE.UNIMPLEMENTED,
)


def _filled(method: Any, path: tuple[str, ...], text: str) -> Any:
    request = getattr(pb, method.input_type.name)()
    if "model" in method.input_type.fields_by_name:
        request.model = MODEL
    inner = request
    for name in path[:-1]:
        inner = getattr(inner, name)
    setattr(inner, path[-1], text)
    return request


@pytest.mark.parametrize("text", list(_HOSTILE.values()), ids=list(_HOSTILE))
def test_no_text_in_any_request_does_more_than_text(site: Site, text: str) -> None:
    assert len(_FIELDS) > 20
    stub = site.server.stub
    for method, path in _FIELDS:
        request = _filled(method, path, text)
        if method.name == "BeginPush" and path[0] in (
            "idempotency_key",
            "fallback_reason",
            "client_run",
        ):
            # It would open a push: these are free text.
            request.version = 1 << 60
        if method.name in ("ApplyVersion", "Rollback"):
            # Nothing is to be switched, whatever the text.
            request.pause.wait_timeout.seconds = -1
        _ask(getattr(stub, method.name), request, streaming=method.server_streaming)
    _check_log(site.server.log)


def _ask(call: Any, request: Any, *, streaming: bool) -> None:
    try:
        answer = call(request, timeout=10)
        if streaming:
            next(answer)
            answer.cancel()
    except grpc.RpcError as error:
        failed: Any = error
        assert failed.code() in _REFUSALS, (request, failed)
        assert failed.details().isprintable(), ascii(failed.details())


def test_hostile_names_reached_neither_log_nor_metrics_nor_path(site: Site) -> None:
    metadata = dict(zip(_HOSTILE, (text[:100] for text in _HOSTILE.values()), strict=True))
    messages = push_messages([("../../x", _shard())], 0, metadata=metadata)
    version = site.server.stub.PushWeights(messages, timeout=30).commit.version
    told = site.server.stub.GetVersion(
        pb.GetVersionRequest(model=MODEL, version=version), timeout=10
    )
    # Data comes back as it was.
    assert dict(told.version.metadata) == metadata
    _check_log(site.server.log)
    _check_metrics(site.server.log)
    store = site.root / "state" / "store"
    names = re.compile(r"(default|v\d+|\d+\.safetensors|[a-z-]+\.json)")
    assert [p for p in store.rglob("*") if not names.fullmatch(p.name)] == []
    assert sorted(p.name for p in site.root.iterdir()) == ["run", "state"]
    request = pb.DeleteVersionRequest(model=MODEL, version=version)
    site.server.stub.DeleteVersion(request, timeout=10)


def _check_log(log: str) -> None:
    assert not [line for line in log.splitlines() if line.startswith("2026-01-01 00:00:00")]
    assert "\x1b" not in log
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in log
    assert "\0" not in log


def _check_metrics(log: str) -> None:
    found = re.findall(r"metrics on (http://\S+)", log)
    with urllib.request.urlopen(found[-1], timeout=5) as answer:
        text = answer.read().decode()
    assert set(re.findall(r'model="([^"]*)"', text)) == {MODEL}
    assert "INJECTED" not in text
    assert "passwd" not in text


# Layouts and headers: A7.


def _layout(data: bytes, *tensors: pb.TensorSpec, header: int = 100) -> pb.LayoutPart:
    return pb.LayoutPart(size_bytes=len(data), header_bytes=header, tensors=tensors, last=True)


_GOOD = _shard()
_HEADER = int.from_bytes(_GOOD[:8], "little")
_BODY = len(_GOOD) - 8 - _HEADER


def _spec(**fields: Any) -> pb.TensorSpec:
    facts: dict[str, Any] = {"name": "a", "dtype": "U8", "shape": [_BODY], "end": _BODY}
    return pb.TensorSpec(**facts | fields)


@pytest.mark.parametrize(
    "tensors",
    {
        "overlap": [_spec(shape=[_BODY - 1], end=_BODY - 1), _spec(name="b", shape=[2], begin=1)],
        "hole": [_spec(shape=[1], end=1), _spec(name="b", shape=[_BODY - 2], begin=2)],
        "first not at 0": [_spec(shape=[_BODY - 1], begin=1)],
        "trailing": [_spec(shape=[_BODY - 1], end=_BODY - 1)],
        "twice": [_spec(shape=[1], end=1), _spec(shape=[_BODY - 1], begin=1)],
        "size is not shape": [_spec(shape=[_BODY // 2])],
        "overflow to the size": [_spec(shape=[1 << 63, 2, _BODY])],
        "overflow to 0": [_spec(shape=[1 << 32, 1 << 32, 0], end=0)],
        "too many dimensions": [_spec(shape=[1] * 100_000)],
        "unknown dtype": [_spec(dtype="pickle")],
        "metadata as a tensor": [_spec(name="__metadata__")],
        "no tensor": [],
    }.values(),
    ids=lambda tensors: tensors[0].name if tensors else "none",
)
def test_impossible_layouts(site: Site, tensors: list[pb.TensorSpec]) -> None:
    layout = _layout(_GOOD, *tensors, header=_HEADER)
    assert _push(site, _GOOD, layout) == (CODE.INVALID_ARGUMENT, Reason.LAYOUT_INVALID)


@pytest.mark.parametrize(
    "header",
    [
        b" " + b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"url":"file:///etc/passwd"}}',
        b'{"a":%s,"a":%s}' % ((b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}',) * 2),
        b'{"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"[" * 60_000,
        b"{" + b'"' * 50_000,
        b'{"a":' + b"9" * 50_000 + b"}",
    ],
    ids=["space", "unknown key", "twice", "other name", "deep", "lists", "quotes", "long number"],
)
def test_headers_that_are_not_their_layout(site: Site, header: bytes) -> None:
    data = struct.pack("<Q", len(header)) + header + bytes(4)
    layout = _layout(data, _spec(shape=[4], end=4), header=len(header))
    begin = time.monotonic()
    assert _push(site, data, layout) == (CODE.INVALID_ARGUMENT, Reason.SHARD_INVALID)
    assert time.monotonic() - begin < 2


def test_a_hundred_thousand_empty_tensors_leave_the_server_free(site: Site) -> None:
    messages = [pb.PushWeightsRequest(begin=pb.BeginPushRequest(model=MODEL))]
    for part in range(60):
        layout = pb.LayoutPart(size_bytes=108, header_bytes=100)
        for at in range(4000):
            layout.tensors.add(name=f"{part}.{at}", dtype="U8", shape=[0])
        messages.append(pb.PushWeightsRequest(layout=layout))
    running = site.server.stub.PushWeights.future(iter(messages), timeout=30)
    slowest = 0.0
    stub = site.server.stub
    while not running.done():
        begin = time.monotonic()
        stub.GetStatus(pb.GetStatusRequest(), timeout=5)
        slowest = max(slowest, time.monotonic() - begin)
    assert running.code() is CODE.OK
    assert slowest < 1
    (push,) = stub.GetStatus(pb.GetStatusRequest(), timeout=5).models[0].pushes
    stub.AbortPush(pb.AbortPushRequest(push_id=push.push_id), timeout=30)


# Other formats under a safetensors name: A11.


class _Canary:
    """Touches a file when somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def _formats(canary: Path) -> dict[str, bytes]:
    pickled = pickle.dumps(_Canary(canary))
    packed, arrays = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        # The layout of a .pt file.
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3")
    np.savez(arrays, a=np.array([_Canary(canary)], dtype=object), allow_pickle=True)
    elf = Path("/proc/self/exe").read_bytes()[:100_000]
    return {"pickle": pickled, "pt": packed.getvalue(), "npz": arrays.getvalue(), "elf": elf}


@pytest.mark.parametrize("kind", ["pickle", "pt", "npz", "elf"])
@pytest.mark.parametrize("inside", [False, True], ids=["bare", "as the header"])
def test_other_formats_are_bytes_that_nobody_loads(
    site: Site, kind: str, inside: bool, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    data = _formats(canary)[kind]
    header = 16
    if inside:
        header = len(data)
        data = struct.pack("<Q", header) + data + b"\0"
    size = len(data) - 8 - header
    layout = _layout(data, _spec(shape=[size], end=size), header=header)
    assert _push(site, data, layout) == (CODE.INVALID_ARGUMENT, Reason.SHARD_INVALID)
    assert not canary.exists()


# Contents that are not the model's: A8.


@pytest.mark.parametrize("how", ["missing", "extra", "shape", "dtype"])
def test_what_the_engine_cannot_take_is_refused_before_the_pause(site: Site, how: str) -> None:
    tensors, kinds = _CONTENTS.tensors(5), dict(KINDS)
    if how == "missing":
        del tensors["step"]
    elif how == "extra":
        tensors["more.weight"], kinds["more.weight"] = bytes(4), ("F32", ())
    elif how == "shape":
        kinds["norm.weight"] = ("F32", (16, 16))
    else:
        kinds["norm.weight"] = ("I32", (256,))
    stub = site.server.stub
    messages = push_messages([("x", _shard(tensors, kinds))], 0)
    version = stub.PushWeights(messages, timeout=30).commit.version
    request = pb.ApplyVersionRequest(model=MODEL, version=version)
    refused = site.refused(lambda: stub.ApplyVersion(request, timeout=30))
    assert refused == (CODE.FAILED_PRECONDITION, Reason.ENGINE_REFUSED)
    stub.DeleteVersion(pb.DeleteVersionRequest(model=MODEL, version=version), timeout=10)


def test_nan_and_infinity_are_legal_bytes(site: Site) -> None:
    tensors = _CONTENTS.tensors(5)
    tensors["norm.weight"] = struct.pack("<2f", float("nan"), float("-inf")) * 128
    stub = site.server.stub
    commit = stub.PushWeights(push_messages([("x", _shard(tensors))], 0), timeout=30).commit
    applied = stub.ApplyVersion(
        pb.ApplyVersionRequest(model=MODEL, version=commit.version), timeout=30
    )
    assert {rank.content_digest for rank in applied.report.ranks} == {commit.content_digest}
    stub.Rollback(pb.RollbackRequest(model=MODEL), timeout=30)
    stub.DeleteVersion(pb.DeleteVersionRequest(model=MODEL, version=commit.version), timeout=10)


# Digests: A13.


def test_other_content_under_a_known_number(site: Site) -> None:
    answer = site.push(push_messages(_CONTENTS.shards(7), 2))
    assert answer == (CODE.ALREADY_EXISTS, Reason.VERSION_CONFLICT)


@pytest.mark.parametrize(
    ("digest", "reason"),
    [
        ("0" * 32, Reason.DIGEST_MISMATCH),
        ("md5:" + "0" * 32, Reason.REQUEST_INVALID),
        ("A" * 32, Reason.REQUEST_INVALID),
        ("0" * 31 + "\n", Reason.REQUEST_INVALID),
    ],
)
def test_a_digest_that_is_wrong_or_none(site: Site, digest: str, reason: Reason) -> None:
    messages = list(push_messages(_CONTENTS.shards(7), 0, idempotency_key=f"d{digest}"))
    messages[-1] = pb.PushWeightsRequest(commit=pb.CommitPushRequest(content_digest=digest))
    assert site.push(messages) == (CODE.INVALID_ARGUMENT, reason)
    if reason is Reason.REQUEST_INVALID:
        # The sentence is wrong, not the bytes: the push is still there.
        (push,) = site.server.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models[0].pushes
        site.server.stub.AbortPush(pb.AbortPushRequest(push_id=push.push_id), timeout=5)


# What a client cannot say at all: A15.

_PLACES = re.compile(r"path|ur[il]|file|dir|folder|segment|socket|endpoint|host|addr|memfd|handle")


def _fields(descriptor: Descriptor, seen: set[str]) -> Iterator[str]:
    if descriptor.full_name not in seen:
        seen.add(descriptor.full_name)
        for field in descriptor.fields:
            yield f"{descriptor.name}.{field.name}"
            if field.message_type is not None:
                yield from _fields(field.message_type, seen)


def test_no_request_has_a_field_for_a_place() -> None:
    seen: set[str] = set()
    names = [name for method in _METHODS for name in _fields(method.input_type, seen)]
    assert "Chunk.offset" in names, "requests are walked to their end"
    places = [name for name in names if _PLACES.search(name.partition(".")[2].lower())]
    # It asks for a way to send, and its message has no field.
    assert places == ["BeginPushRequest.same_host"]
    assert not pb.SameHostSource.DESCRIPTOR.fields
    assert not [name for name in seen if name == "google.protobuf.Any"]


# Numbers: A21.


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"version": 1 << 53}, (CODE.INVALID_ARGUMENT, Reason.REQUEST_INVALID)),
        ({"version": (1 << 63) - 1}, (CODE.INVALID_ARGUMENT, Reason.REQUEST_INVALID)),
        ({"version": (1 << 64) - 1}, (CODE.INVALID_ARGUMENT, Reason.REQUEST_INVALID)),
        ({"version": (1 << 53) - 1}, (CODE.OUT_OF_RANGE, Reason.VERSION_JUMP)),
        ({"version": 1_000_100}, (CODE.OUT_OF_RANGE, Reason.VERSION_JUMP)),
        ({"epoch": (1 << 63) - 1}, (CODE.INVALID_ARGUMENT, Reason.REQUEST_INVALID)),
        ({"epoch": (1 << 64) - 1}, (CODE.INVALID_ARGUMENT, Reason.REQUEST_INVALID)),
        ({"epoch": (1 << 53) - 1}, (CODE.FAILED_PRECONDITION, Reason.EPOCH_STALE)),
    ],
)
def test_nobody_runs_ahead_with_the_numbers(
    site: Site, fields: dict[str, int], answer: tuple[grpc.StatusCode, Reason]
) -> None:
    stub = site.server.stub
    request = pb.BeginPushRequest(model=MODEL, **fields)  # type: ignore[arg-type]
    assert site.refused(lambda: stub.BeginPush(request, timeout=10)) == answer
    # The next number is still the next one.
    highest = Census.take(site.server).versions[0][0]
    begun = site.server.stub.BeginPush(pb.BeginPushRequest(model=MODEL), timeout=10)
    assert begun.version <= highest + 20
    site.server.stub.AbortPush(pb.AbortPushRequest(push_id=begun.push_id), timeout=10)
