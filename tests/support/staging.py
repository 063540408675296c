"""Plays the server to an engine: segments, staged versions, status pages and bridge calls."""

from __future__ import annotations

import json
import os
import secrets
import time
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.duration_pb2 import Duration

from weightsync.engine import PROTOCOL_VERSION
from weightsync.engine.v1 import engine_pb2 as pb
from weightsync.engine.v1 import engine_pb2_grpc
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import check_shard, check_version, parse_header
from weightsync.model.manifest import Manifest, ShardEntry
from weightsync.model.name_sets import common
from weightsync.shm.segment_socket import SegmentServer
from weightsync.shm.segments import Segment
from weightsync.shm.staged_version import StagedVersion
from weightsync.shm.status_page import PageReader

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BridgeClient", "Staging", "Version"]

_JOB_S = 60.0


class Version:
    """A checkpoint in shared memory.

    Attributes:
        staged: Its document.
        segments: The bytes of each shard.
    """

    def __init__(self, staged: StagedVersion, document: Segment, segments: list[Segment]) -> None:
        self.staged = staged
        self.document = document
        self.segments = segments

    @property
    def content_digest(self) -> str:
        """Identity of the version."""
        return self.staged.manifest.content_digest

    def tensor_bytes(self, name: str) -> memoryview:
        """Return a tensor's bytes in its segment, writable."""
        layout = self.staged.manifest.layout
        entry = next(t for t in layout.tensors if t.name == name)
        start = layout.shards[entry.shard].data_start
        return self.segments[entry.shard].view[start + entry.begin : start + entry.end]


class Staging:
    """A segment socket and what is published on it.

    Args:
        socket: Where to serve.
    """

    def __init__(self, socket: Path) -> None:
        self.server = SegmentServer(socket)
        self.socket = str(socket)
        self._pages: list[PageReader] = []
        self.versions: list[Version] = []

    def publish(self, segment: Segment) -> None:
        """Publish a segment under its id."""
        self.server.publish(segment.id, segment.read_only_fd(), segment.capacity)

    def stage_files(self, files: list[bytes]) -> Version:
        """Stage the bytes of safetensors files."""
        shards, groups, segments, digests = [], [], [], []
        for index, raw in enumerate(files):
            size = int.from_bytes(raw[:8], "little")
            shard = ShardEntry(f"shard-{index}", len(raw), size)
            tensors = check_shard(shard, parse_header(raw[8 : 8 + size], index))
            segment = Segment.create(len(raw))
            segment.view[: len(raw)] = raw
            self.publish(segment)
            shards.append(shard)
            groups.append(tensors)
            segments.append(segment)
            start = shard.data_start
            digests += [tensor_digest(raw[start + t.begin : start + t.end]) for t in tensors]
        manifest = Manifest(check_version(shards, groups), tuple(digests))
        staged = StagedVersion(manifest, tuple(segment.id for segment in segments))
        document = staged.to_segment()
        self.publish(document)
        version = Version(staged, document, segments)
        self.versions.append(version)
        return version

    def stage(self, directory: Path) -> Version:
        """Stage the safetensors files of a checkpoint directory."""
        files = sorted(directory.glob("*.safetensors"))
        return self.stage_files([file.read_bytes() for file in files])

    def pages(self, ranks: list[str]) -> tuple[str, list[PageReader]]:
        """Return the common name of new status pages and one page per rank."""
        name = secrets.token_hex(4)
        pages = [PageReader() for _ in ranks]
        for rank, page in zip(ranks, pages, strict=True):
            fd = os.dup(page.segment.fd)
            self.server.publish(f"{name}/{rank}", fd, page.segment.capacity)
        self._pages += pages
        return name, pages

    def close(self) -> None:
        """Give everything back."""
        self.server.close()
        for page in self._pages:
            page.close()
        for version in self.versions:
            for segment in (version.document, *version.segments):
                segment.close()


def _duration(seconds: float) -> Duration:
    value = Duration()
    value.FromNanoseconds(int(seconds * 1e9))
    return value


class BridgeClient:
    """Calls the bridge as the server does, in small steps that tests can break apart.

    Args:
        socket: The engine socket.
        staging: Where versions come from.
    """

    def __init__(self, socket: Path, staging: Staging) -> None:
        self.channel = grpc.insecure_channel(f"unix:{socket}")
        self.stub = engine_pb2_grpc.EngineServiceStub(self.channel)
        self.staging = staging
        self.ranks: list[str] = []

    def hello(self) -> pb.HelloResponse:
        """Say hello."""
        answer = self.stub.Hello(
            pb.HelloRequest(protocol=PROTOCOL_VERSION, server_version="test"), timeout=30
        )
        self.ranks = list(answer.ranks)
        return answer

    def health(self) -> pb.HealthResponse:
        """Ask for the state."""
        return self.stub.Health(pb.HealthRequest(), timeout=30)

    def call(self, method: str, **args: Any) -> list[dict[str, Any]]:
        """Call a worker method on all ranks."""
        request = pb.CallWorkersRequest(
            method=f"weightsync_{method}", args_json=json.dumps(args).encode()
        )
        answer = self.stub.CallWorkers(request, timeout=120)
        return [json.loads(reply) for reply in answer.replies_json]

    def job(
        self, method: str, apply_id: str, version: Version | None, **more: Any
    ) -> list[dict[str, Any]]:
        """Start a job on all ranks and return the final reports of their pages."""
        name, pages = self.staging.pages(self.ranks)
        args: dict[str, Any] = {"apply_id": apply_id, "socket": self.staging.socket, **more}
        if version is not None:
            args["document"] = version.document.id
        args["page"] = name
        for reply in self.call(method, **args):
            assert reply["ok"], reply
        deadline = time.monotonic() + _JOB_S
        while time.monotonic() < deadline:
            reports = [report for page in pages if (report := page.read())]
            if len(reports) == len(pages) and all(r["phase"] != "running" for r in reports):
                return reports
            time.sleep(0.002)
        msg = f"no report: {[page.read() for page in pages]}"
        raise AssertionError(msg)

    def prepare(
        self, version: Version, *, compare_live: bool = False, apply_id: str = "", base: str = ""
    ) -> tuple[str, list[Any]]:
        """Prepare a version; captures the load plan when asked to, under a pause if it serves."""
        apply_id = apply_id or secrets.token_hex(4)
        reports = self.job("prepare", apply_id, version, compare_live=compare_live, base=base)
        if {report["phase"] for report in reports} - {"ready"} == {"needs_capture"}:
            replies = self.capture(version)
            if not all(reply["ok"] for reply in replies):
                return apply_id, [{"phase": "failed", **reply} for reply in replies]
            unloaded = common(reply["ignored"] for reply in replies)
            reports = self.job(
                "prepare", apply_id, version, compare_live=compare_live, unloaded=unloaded
            )
        return apply_id, reports

    def capture(self, version: Version) -> list[dict[str, Any]]:
        """Capture the load plan of a version's layout."""
        serving = self.health().state == pb.BRIDGE_STATE_SERVING
        lease = self.pause() if serving else ""
        state = self.call("state")[0]
        replies = self.call("capture", document=version.document.id, socket=self.staging.socket)
        if serving:
            self.resume(lease, 0, state["content_digest"])
        return replies

    def pause(self, lease_s: float = 30.0, mode: str = "keep", **more: Any) -> str:
        """Pause and return the lease."""
        clear = more.pop("clear_cache", True)
        wait = _duration(more.pop("wait_timeout_s", 0.0))
        request = pb.PauseRequest(
            mode=mode, clear_cache=clear, wait_timeout=wait, lease=_duration(lease_s), **more
        )
        return self.stub.Pause(request, timeout=60).lease_id

    def renew(self, lease: str, lease_s: float) -> None:
        """Prolong a lease."""
        request = pb.RenewLeaseRequest(lease_id=lease, lease=_duration(lease_s))
        self.stub.RenewLease(request, timeout=30)

    def resume(self, lease: str, version: int, digest: str) -> bool:
        """Resume."""
        request = pb.ResumeRequest(lease_id=lease, version=version, content_digest=digest)
        return self.stub.Resume(request, timeout=60).label_set

    def score(
        self, sequences: list[list[int]], lease: str = "", limit_s: float = 30.0
    ) -> list[list[float]]:
        """Score sequences, in a pause if there is a lease."""
        request = pb.ScoreRequest(
            sequences=[pb.Sequence(tokens=tokens) for tokens in sequences],
            lease_id=lease,
            limit=_duration(limit_s),
        )
        answer = self.stub.Score(request, timeout=60)
        return [list(scores.logprobs) for scores in answer.scores]

    def fence(self, reason: str) -> None:
        """Fence."""
        self.stub.Fence(pb.FenceRequest(reason=reason), timeout=30)

    def adopt(self, version: Version) -> str:
        """Prove that the engine holds a version and let it serve; returns the apply id."""
        apply_id, reports = self.prepare(version, compare_live=True)
        assert all(report["proved"] is True for report in reports), reports
        self.resume("", 1, version.content_digest)
        return apply_id

    def commit(self, apply_id: str) -> list[dict[str, Any]]:
        """Write a prepared version."""
        return self.call("commit", apply_id=apply_id)

    def apply(
        self, version: Version, number: int, *, apply_id: str = "", **pause: Any
    ) -> list[dict[str, Any]]:
        """Prepare if needed, pause, commit, resume."""
        if not apply_id:
            apply_id, reports = self.prepare(version)
            assert all(report["phase"] == "ready" for report in reports), reports
        lease = self.pause(**pause)
        replies = self.commit(apply_id)
        assert all(r["content_digest"] == version.content_digest for r in replies), replies
        self.resume(lease, number, version.content_digest)
        return replies

    def switch(
        self,
        version: Version,
        number: int,
        apply_id: str,
        base: Version,
        base_id: str,
        cache: str = "",
    ) -> pb.SwitchResponse:
        """Change from what is served to another prepared version between two steps."""
        request = pb.SwitchRequest(
            apply_id=apply_id,
            base_apply_id=base_id,
            version=number,
            content_digest=version.content_digest,
            base_content_digest=base.content_digest,
            limit=_duration(30.0),
            cache=cache,
        )
        return self.stub.Switch(request, timeout=120)

    def close(self) -> None:
        """Close the channel."""
        self.channel.close()
