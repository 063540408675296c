"""A real server and an in-memory engine behind the real bridge, and errors at the failpoints."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc

from tests.support.bounds import MODEL, Message, begin, one_shard, within
from tests.support.deltas import delta_begin, delta_of, push_version
from tests.support.lending import Trainer
from tests.support.memory_bridge import memory_bridge
from tests.support.weightsync_server import WeightSyncServer
from tests.unit.server.world import content
from weightsync import failpoints
from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync.testing import MemoryEngine
    from weightsync.v1 import weightsync_pb2_grpc

__all__ = ["SIZE", "ErringSite", "erring_site", "weight"]

#: Bytes of the model's only tensor.
SIZE = 1000
_T = TypeVar("_T")


def weight(seed: int) -> bytes:
    """Return the bytes of the tensor in the version that is pushed with this seed."""
    return one_shard(SIZE, seed).data[-SIZE:]


class ErringSite:
    """One server, and what it has acknowledged.

    Args:
        folder: Empty; a short path, because unix sockets allow 107 bytes.

    Attributes:
        pushed: Seed of the content by version, as acknowledged.
        engine: In this process, once `serve` was called.
    """

    def __init__(self, folder: Path) -> None:
        self._plan = folder / "plan"
        self.server = WeightSyncServer(
            folder / "run",
            folder / "state",
            flags=(
                "--same-host",
                "--slots",
                "3",
                "--retain-versions",
                "1000",
                "--delta-chain-length",
                "2",
                "--delta-chain-share",
                "100",
            ),
            variables={failpoints.VARIABLE: f"@{self._plan}"},
        )
        self.pushed: dict[int, int] = {}
        self.engine: MemoryEngine
        self._stub: weightsync_pb2_grpc.WeightSyncStub | None = None

    @property
    def stub(self) -> weightsync_pb2_grpc.WeightSyncStub:
        """The calls of the server that runs now."""
        self._stub = self._stub or self.server.stub
        return self._stub

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Run the engine and the server until the block ends."""
        self.server.run_dir.mkdir(parents=True)
        with memory_bridge(self.server.run_dir, {"weight": ("U8", (SIZE,), weight(0))}) as engine:
            self.engine = engine
            self.server.start()
            try:
                yield
            finally:
                code = self.server.stop()
        assert code == 0, self.server.log

    # What fails

    def arm(self, plan: str) -> None:
        """Let the server and its fetchers fail as planned from now on."""
        self._hits.unlink(missing_ok=True)
        self._plan.write_text(plan)

    def met(self) -> bool:
        """Whether anything has failed since `arm`."""
        return self._hits.exists()

    def disarm(self, met: str) -> None:
        """Let nothing fail any more; a failpoint must have been met."""
        self._plan.unlink(missing_ok=True)
        assert self.met(), f"{met} was not met"
        assert {line.split()[0] for line in self._hits.read_text().splitlines()} == {met}

    @property
    def _hits(self) -> Path:
        return Path(f"{self._plan}.hits")

    def kill(self) -> None:
        """End the server as a crash does."""
        self.server.kill()
        self._stub = None

    # What is asked for

    def push(self, version: int, size: int = SIZE, **fields: object) -> pb.CommitPushResponse:
        """Push a version on one stream, or what of it is not there yet."""
        seed = version % 251
        shard = one_shard(size, seed)
        key = f"push-{version}"

        def messages() -> Iterator[Message]:
            yield Message(begin=begin(version=version, idempotency_key=key, **fields))
            yield from shard.all()
            yield Message(commit=pb.CommitPushRequest())

        answer = self.stub.PushWeights(messages(), timeout=30).commit
        self.pushed[version] = seed
        return answer

    def hand_over(self, version: int) -> pb.CommitPushResponse:
        """Push a version as a trainer that writes it, as the server cannot copy it from a GPU."""
        seed = version % 251
        shards = [one_shard(SIZE, seed)]
        trainer = Trainer(self.stub, key=f"push-{version}", version=version, shards=shards)
        try:
            assert trainer.borrower.collect(0, trainer.placed(0))
            trainer.hand(0)
            answer = trainer.commit()
        finally:
            trainer.borrower.close()
        self.pushed[version] = seed
        return answer

    def push_delta(self, version: int) -> pb.CommitPushResponse:
        """Push a version as what changed since the newest one."""
        base = max(self.pushed)
        before, after = ([one_shard(SIZE, seed)] for seed in (self.pushed[base], version % 251))
        answer = push_version(
            self.stub,
            delta_of(before, after),
            content(after),
            version=version,
            idempotency_key=f"push-{version}",
            **delta_begin(before),
        )
        self.pushed[version] = version % 251
        return answer

    def apply(self, version: int) -> pb.ApplyReport:
        """Make a version live."""
        request = pb.ApplyVersionRequest(model=MODEL, version=version, clear_rejected=True)
        return self.stub.ApplyVersion(request, timeout=30).report

    def pull(self, version: int) -> bytes:
        """Return the bytes of a version."""
        request = pb.PullWeightsRequest(model=MODEL, version=version)
        return b"".join(m.chunk.data for m in self.stub.PullWeights(request, timeout=20))

    def versions(self) -> dict[int, pb.VersionInfo]:
        """Return the committed versions."""
        found = self.stub.ListVersions(pb.ListVersionsRequest(model=MODEL), timeout=5).versions
        return {info.version: info for info in found if info.durability == pb.DURABILITY_COMMITTED}

    def next_version(self) -> int:
        """Return a number that was never used."""
        return max(self.pushed, default=1) + 1

    def outcome(self, call: Callable[[], _T]) -> WeightSyncError | None:
        """Return the refusal of a call, which must have a reason; None: it was done."""
        try:
            call()
        except WeightSyncError as error:
            return error
        except grpc.RpcError as error:
            told = from_call(error)
            unclean = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
            if told is None or told.code in unclean:
                raise
            return told
        return None

    # What must hold

    def check(self) -> None:
        """Check that it serves one whole version, and that only what is there is held."""
        live = self.server.wait_serving(20)
        assert self.engine.live["weight"] == weight(self.pushed.get(live.live_version, 0))
        # What is retired is unmapped in a thread, and deltas are folded in the background.
        within(10, self._settled)
        status = self.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
        assert not sum(status.invariant_violations.values()), status.invariant_violations
        (model,) = status.models
        assert not model.pushes
        assert self.versions().keys() == {1, *self.pushed}
        assert not list((self.server.state_dir / "store").rglob("*.tmp"))

    def _settled(self) -> bool:
        status = self.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
        (model,) = status.models
        leases = {slot.version: slot.leases for slot in model.slots if slot.leases}
        slots = sum(slot.reserved_bytes for slot in model.slots)
        return status.memory_reserved_bytes == slots and leases == {model.live_version: 1}


@contextlib.contextmanager
def erring_site(plan: str = "") -> Iterator[ErringSite]:
    """Run a site whose server has adopted the engine's checkpoint; remove everything at the end.

    Args:
        plan: What fails meanwhile.
    """
    folder = Path(tempfile.mkdtemp(prefix="wse-"))
    try:
        site = ErringSite(folder)
        site.arm(plan)
        with site.serve():
            site.server.wait_serving()
            yield site
    finally:
        shutil.rmtree(folder)
