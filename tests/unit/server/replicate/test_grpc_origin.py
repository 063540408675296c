"""A server that is followed: what it tells, what it sends, and what an older one does not know."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from tests.unit.server.deltas.pushing import push_chain, push_delta, sparse_history, until
from tests.unit.server.replicate.conftest import following
from tests.unit.server.world import MODEL, content, simple
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.grpc_channels import SERVER_KEEPALIVE
from weightsync_server.auth import Endpoint, Role
from weightsync_server.auth.admission import Admission
from weightsync_server.auth.audit import Audit
from weightsync_server.auth.auth_interceptor import AuthorityInterceptor
from weightsync_server.catalog.kept_probes import unpack
from weightsync_server.ops.metrics import Metrics
from weightsync_server.rpc import add_calls
from weightsync_server.usecases.core import ServerCore, VersionBundle
from weightsync_server.usecases.methods import use_cases

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.unit.server.world import World


class Pulls(grpc.aio.ServerInterceptor):
    """Serves PullWeights as the server does."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if not handler_call_details.method.endswith("/PullWeights"):
            return handler

        async def pull(request: Any, context: Any) -> AsyncIterator[pb.PullWeightsResponse]:
            async for message in self.pull(handler.unary_stream, request, context):
                yield message

        return grpc.unary_stream_rpc_method_handler(
            pull, handler.request_deserializer, handler.response_serializer
        )

    async def pull(
        self, inner: Any, request: pb.PullWeightsRequest, context: Any
    ) -> AsyncIterator[pb.PullWeightsResponse]:
        async for message in inner(request, context):
            yield message


class OlderPulls(Pulls):
    """Of a release that does not know what is asked for beside the version."""

    async def pull(
        self, inner: Any, request: pb.PullWeightsRequest, context: Any
    ) -> AsyncIterator[pb.PullWeightsResponse]:
        request.delta = False
        async for message in inner(request, context):
            yield message


class CutPulls(Pulls):
    """Streams that end in the midst of a version, twice.

    Attributes:
        asked: What it was asked for.
    """

    def __init__(self) -> None:
        self.asked: list[pb.PullWeightsRequest] = []

    async def pull(
        self, inner: Any, request: pb.PullWeightsRequest, context: Any
    ) -> AsyncIterator[pb.PullWeightsResponse]:
        self.asked.append(request)
        sent = 0
        async for message in inner(request, context):
            yield message
            sent += message.HasField("chunk")
            if sent == 3 and len(self.asked) < 3:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")


@contextlib.asynccontextmanager
async def served(origin: World, kind: type[Pulls] = Pulls) -> AsyncIterator[tuple[str, Any]]:
    """Serve a world; give its URL and what its pulls go through."""
    pulls, nothing = kind(), cast("Any", None)
    audit = Audit(MODEL, Metrics(MODEL))
    first = AuthorityInterceptor(Admission(Endpoint("unix:x", Role.ADMIN), None, MODEL, audit))
    server = grpc.aio.server(options=SERVER_KEEPALIVE, interceptors=[first, pulls])
    # Disks, engines and status are no part of this.
    versions = VersionBundle(origin.model, origin.pushes, nothing, nothing)
    core = ServerCore(versions, nothing, nothing)
    add_calls(use_cases(core), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"grpc://127.0.0.1:{port}", pulls
    finally:
        await server.stop(None)


async def test_it_tells_of_each_commit_and_sends_deltas(origin: World, tmp_path: Path) -> None:
    versions = sparse_history(2)
    async with served(origin) as (url, _), following(tmp_path / "b", url) as there:
        # Nobody asks again for a minute: it is told.
        for number, shards in enumerate(versions, 1):
            if number == 1:
                await origin.push(shards, number)
            else:
                await push_delta(origin, versions[number - 2], shards, number)
            await until(lambda n=number: there.has(n))  # type: ignore[misc]  # of an int
        await until(lambda: there.metric("weightsync_follow_fetched_total", form="delta") == 2)
        assert there.here.read(3) == [shard.data for shard in versions[2]]
        ours, theirs = (w.model.table.get(3).commit for w in (there.here, origin))
        assert ours is not None
        assert theirs is not None
        assert (ours.base_version, ours.manifest_digest) == (2, theirs.manifest_digest)


async def test_an_older_release_is_followed_in_full(origin: World, tmp_path: Path) -> None:
    versions = sparse_history(1)
    await origin.push(versions[0], 1)
    async with served(origin, OlderPulls) as (url, _), following(tmp_path / "b", url) as there:
        await until(lambda: there.has(1))
        await push_delta(origin, versions[0], versions[1], 2)
        await until(lambda: there.has(2, content(versions[1])))
        await until(lambda: there.metric("weightsync_follow_fetched_total", form="full") == 2)
        assert there.here.read(2) == [shard.data for shard in versions[1]]


async def test_a_stream_that_was_cut_goes_on_where_it_was(origin: World, tmp_path: Path) -> None:
    shards = simple(1, shards=2, size=1 << 20)
    await origin.push(shards, 1)
    async with served(origin, CutPulls) as (url, pulls), following(tmp_path / "b", url) as at:
        await until(lambda: at.has(1, content(shards)))
        assert at.here.read(1) == [shard.data for shard in shards]
        first, *later = pulls.asked
        assert not first.HasField("shard")
        assert [(request.shard, request.offset) for request in later][:1] == [(0, 3 << 20)]
        assert all(request.HasField("shard") for request in later)


async def test_what_is_damaged_here_comes_again(origin: World, tmp_path: Path) -> None:
    shards = simple(1)
    await origin.push(shards, 1)
    async with served(origin) as (url, _):
        async with following(tmp_path / "b", url) as there:
            await until(lambda: there.has(1, content(shards)))
            file = Path(there.here.model.store.shard_path(MODEL, 1, 0) or "")
        await asyncio.to_thread(file.write_bytes, bytes(len(shards[0].data)))
        async with following(tmp_path / "b", url) as there:
            await until(lambda: file.read_bytes() == shards[0].data)
            assert there.here.read(1) == [shard.data for shard in shards]


async def test_a_long_chain_comes_in_full(origin: World, tmp_path: Path) -> None:
    versions = sparse_history(12)
    await push_chain(origin, versions)
    async with served(origin) as (url, _), following(tmp_path / "b", url) as there:
        await until(lambda: there.has(13))
        assert [record.version for record in there.here.model.table.list()] == [13]


async def test_bytes_that_do_not_make_the_digest_that_was_told_are_refused(
    origin: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await origin.push(simple(1), 1)
    async with served(origin) as (url, _):
        record = origin.model.table.get(1)
        info = record.to_info()
        info.content_digest = "0" * 32
        with monkeypatch.context() as patch:
            patch.setattr(type(record), "to_info", lambda _: info)
            async with following(tmp_path / "b", url) as there:
                await until(lambda: there.metric("weightsync_follow_failures_total") > 0)
                assert there.here.model.table.list() == []
    assert f"the trainer computed {'0' * 32}" in caplog.text


@pytest.mark.parametrize("stored", [False, True])
async def test_probes_come_with_a_version(origin: World, tmp_path: Path, *, stored: bool) -> None:
    probes = pb.Probes(probes=[pb.Probe(tokens=[1, 2, 3], logprobs=[-1.0, -2.0])])
    async with served(origin) as (url, _):
        source = origin.model.store.url if stored else url
        async with following(tmp_path / "b", source) as there:
            await origin.push(simple(1), 1, probes=probes)
            await until(lambda: there.has(1))
            record = there.here.model.table.get(1)
            assert record.commit is not None
            assert unpack(record.commit.probes) == probes
            assert record.to_info().probe_count == 1
