"""TLS on a real server: attack A3, and certificates and tokens that change during a push (54)."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.certificates import Authority
from tests.support.secured import METHODS, Secured, code_of
from tests.support.stock import layout_part
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_server.auth import RULES, Role
from weightsync_server.auth.principals import new_token

STATUS = "/weightsync.v1.WeightSync/GetStatus"
AWAY = grpc.StatusCode.UNAVAILABLE
#: Floats of the one tensor that is pushed while something is rotated.
FLOATS = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="wst"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def mutual() -> Iterator[Secured]:
    path = Path(tempfile.mkdtemp(prefix="wsm"))
    secured = Secured(path, tls=True, mutual=True).start()
    yield secured
    assert secured.stop() == 0
    shutil.rmtree(path)


@pytest.mark.parametrize("role", Role)
def test_a_certificate_gives_the_roles_of_its_name(mutual: Secured, role: Role) -> None:
    channel = mutual.channel(mutual.ca.sign("whoever", f"{role}.test", file=f"leaf-{role}"))
    for path in METHODS:
        denied = code_of(channel, path, timeout_s=2) is grpc.StatusCode.PERMISSION_DENIED
        assert denied is not RULES[path].allows(frozenset({role})), path


def test_a_common_name_counts_only_without_alternative_names(mutual: Secured) -> None:
    common = mutual.ca.sign("admin.test", file="common")
    shadowed = mutual.ca.sign("admin.test", "nobody.test", file="shadowed")
    assert code_of(mutual.channel(common), STATUS) is grpc.StatusCode.OK
    assert code_of(mutual.channel(shadowed), STATUS) is grpc.StatusCode.UNAUTHENTICATED


def test_a_certificate_of_two_principals_proves_neither(mutual: Secured) -> None:
    both = mutual.ca.sign("both", "read.test", "push.test")
    assert code_of(mutual.channel(both), STATUS) is grpc.StatusCode.UNAUTHENTICATED


def test_a_bad_token_is_not_saved_by_a_good_certificate(mutual: Secured) -> None:
    channel = mutual.channel(mutual.ca.sign("one", "admin.test"))
    bad = (("authorization", "Bearer nobody"),)
    assert code_of(channel, STATUS, bad) is grpc.StatusCode.UNAUTHENTICATED
    assert code_of(channel, STATUS, mutual.bearer("read")) is grpc.StatusCode.OK


def test_a_stranger_does_not_get_in(mutual: Secured, folder: Path) -> None:
    foreign = Authority(folder / "foreign").sign("admin.test", "admin.test")
    assert code_of(mutual.channel(), STATUS, mutual.bearer("admin")) is AWAY
    assert code_of(mutual.channel(foreign), STATUS, mutual.bearer("admin")) is AWAY
    with grpc.insecure_channel(mutual.address) as plain:
        assert code_of(plain, STATUS, mutual.bearer("admin")) is AWAY
    with grpc.secure_channel(mutual.address, grpc.ssl_channel_credentials()) as distrusting:
        assert code_of(distrusting, STATUS) is AWAY
    # And it lives.
    own = mutual.channel(mutual.ca.sign("late", "read.test"))
    assert code_of(own, STATUS) is grpc.StatusCode.OK


def test_bytes_that_are_no_tls_are_dropped(mutual: Secured) -> None:
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n", b"\x16\x03", bytes(999)):
        with (
            socket.create_connection(("127.0.0.1", mutual.port), timeout=30) as stranger,
            contextlib.suppress(ConnectionError),
        ):
            stranger.sendall(junk)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    own = mutual.channel(mutual.ca.sign("after", "read.test"))
    assert code_of(own, STATUS) is grpc.StatusCode.OK


def test_unix_sockets_of_roles_need_no_certificate(mutual: Secured) -> None:
    channel = mutual.channel(address=mutual.socket("read"))
    assert code_of(channel, STATUS) is grpc.StatusCode.OK
    path = "/weightsync.v1.WeightSync/Rollback"
    assert code_of(channel, path) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("old_token_stays", [True, False])
def test_rotation_during_a_push(folder: Path, old_token_stays: bool) -> None:
    secured = Secured(folder, tls=True).start()
    try:
        old = secured.bearer("push")
        first = _served(secured)
        go = threading.Event()
        stub = weightsync_pb2_grpc.WeightSyncStub(secured.channel())
        push = stub.PushWeights.future(_push(go), metadata=old, timeout=50)
        # What a client handed to gRPC may still lie there.
        _admitted(secured)
        secured.ca.sign("server", "localhost", file="fresh").move_to(secured.pair)
        secured.write(**({} if old_token_stays else {"push": new_token()}))
        assert _served(secured) != first
        code = code_of(secured.channel(), STATUS, old)
        assert (code is grpc.StatusCode.OK) is old_token_stays
        assert code_of(secured.channel(), STATUS, secured.bearer("push")) is grpc.StatusCode.OK
        # The call under way was admitted; it ends as it would have.
        go.set()
        assert push.result(timeout=30).commit.tensor_count == 1
    finally:
        assert secured.stop() == 0


def test_a_pair_that_does_not_fit_changes_nothing(folder: Path) -> None:
    secured = Secured(folder, tls=True).start()
    try:
        first = _served(secured)
        fresh = secured.ca.sign("server", "localhost", file="fresh")
        # Half of a rotation: the certificate is new, the key is not.
        fresh.certificate.rename(secured.pair.certificate)
        assert _served(secured) == first
        assert "the previous certificate stays in use" in secured.server.log
        fresh.key.rename(secured.pair.key)
        assert _served(secured) != first
    finally:
        assert secured.stop() == 0


def test_an_authority_file_that_breaks_changes_nothing(folder: Path) -> None:
    secured = Secured(folder).start()
    try:
        channel, old = secured.channel(), secured.bearer("read")
        for broken in ("[[principal", "", "[[principal]]\nname = 'x'\n"):
            secured.file.write_text(broken)
            assert code_of(channel, STATUS, old) is grpc.StatusCode.OK
        secured.write(read=new_token())
        secured.file.chmod(0o666)
        code = code_of(channel, STATUS, secured.bearer("read"))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        secured.file.chmod(0o600)
        secured.file.unlink()
        assert code_of(channel, STATUS, old) is grpc.StatusCode.OK
        assert secured.server.log.count("the previous content stays in force") == 5
        secured.write(read=new_token())
        assert code_of(channel, STATUS, secured.bearer("read")) is grpc.StatusCode.OK
    finally:
        assert secured.stop() == 0


def _push(go: threading.Event) -> Iterator[pb.PushWeightsRequest]:
    header = b'{"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (FLOATS, 4 * FLOATS)
    data = len(header).to_bytes(8, "little") + header + bytes(4 * FLOATS)
    begin = pb.BeginPushRequest(model="default", shard_count=1)
    yield pb.PushWeightsRequest(begin=begin)
    yield pb.PushWeightsRequest(layout=layout_part(0, "model.safetensors", data))
    for offset in range(0, len(data), 1 << 20):
        chunk = pb.Chunk(shard=0, offset=offset, data=data[offset : offset + (1 << 20)])
        yield pb.PushWeightsRequest(chunk=chunk)
        go.wait(40)
    yield pb.PushWeightsRequest(commit=pb.CommitPushRequest())


def _admitted(secured: Secured) -> None:
    """Return when the server has a push under way."""
    stub = weightsync_pb2_grpc.WeightSyncStub(secured.channel(address=secured.socket("admin")))
    deadline = time.monotonic() + 20
    while not any(model.pushes for model in stub.GetStatus(pb.GetStatusRequest()).models):
        assert time.monotonic() < deadline, "the push never reached the server"
        time.sleep(0.01)


def _served(secured: Secured) -> bytes:
    """Return the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=str(secured.ca.ca))
    with (
        socket.create_connection(("127.0.0.1", secured.port), timeout=5) as link,
        context.wrap_socket(link, server_hostname="localhost") as protected,
    ):
        shown = protected.getpeercert(binary_form=True)
    assert shown is not None
    return shown
