"""One version as the server knows it, and how it is told to clients."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Protocol

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.local_numbers import FIRST_LOCAL, LOCAL_BEFORE
from weightsync_server.store.store_records import CommitRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.model.manifest import Manifest
    from weightsync.shm.segments import Segment
    from weightsync_server.store.store_records import DeltaFacts

__all__ = ["Residence", "VersionRecord"]


class Residence(Protocol):
    """Where the bytes of a version lie in shared memory; a slot is one.

    Attributes:
        leases: Readers that rely on the bytes.
        writing: The bytes are not final yet.
        segments: Segment of each shard.
    """

    leases: int
    writing: bool
    segments: dict[int, Segment]

    def ordered(self) -> list[Segment]:
        """Return the segments in the order of the shards."""

    def settle(self) -> None:
        """Take note that the bytes are final."""

    def empty(self) -> None:
        """Forget the version; its bytes are nobody's."""


@dataclass(eq=False)
class VersionRecord:
    """The three states of a version and what is known of it. Changed on the event loop only.

    Attributes:
        model: Model name.
        version: The version.
        epoch: Epoch of its writer; 0: adopted.
        metadata: From BeginPush.
        durability: Receiving, committed or failed.
        residency: Absent, staging or staged.
        serving: No, live or rejected.
        rejected_reason: Why "newest" skips it; empty: it does not.
        refused_reason: Why every engine of this host refuses its content; empty: one may take it.
        pinned: It is never collected and keeps its slot.
        manifest: Only while it lies in a slot, verified: 37,000 tensors take about 15 MB.
        commit: The commit record, once committed.
        slot: Where its bytes lie or arrive.
        missing: While receiving: tells what has not arrived, at most 10 items.
        served: It was live once.
        damaged: What is wrong with it in the store; empty: nothing that is known.
        push_id: The push that brings it; empty: none.
        key: Idempotency key of that push; empty: none.
        client_run: The run of the client that pushes it; empty: not known.
        epoch_taken: That run took the epoch.
        orphaned: Its push failed; it stays for as long as it is live or leased.
        base: The version whose bytes it is kept as a change of; None: it is kept in full.
        holds: Pushes of deltas that are based on it.
        awaited: Callers for whom it is being read, or who are about to get a lease.
        in_place: The transaction that has written it into an engine's memory, which has it alone
            until its push was compared with that; empty: it comes otherwise.
        backfill: It comes from the origin of this server, which has given it its number: it may lie
            below numbers that were used here.
        layout_check: Whether the engine was asked if it takes such tensors.
        live_check: While it is live: whether the live parameters of every engine that serves it
            were compared as a whole.
        live_check_ns: When they were, Unix time in nanoseconds; 0: they are to be.
    """

    model: str
    version: int
    epoch: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    durability: pb.Durability.ValueType = pb.DURABILITY_RECEIVING
    residency: pb.Residency.ValueType = pb.RESIDENCY_ABSENT
    serving: pb.Serving.ValueType = pb.SERVING_NO
    rejected_reason: str = ""
    refused_reason: str = ""
    pinned: bool = False
    manifest: Manifest | None = None
    commit: CommitRecord | None = None
    slot: Residence | None = None
    missing: Callable[[], list[str]] | None = None
    served: bool = False
    damaged: str = ""
    push_id: str = ""
    key: str = ""
    client_run: str = ""
    epoch_taken: bool = False
    orphaned: bool = False
    base: VersionRecord | None = None
    holds: int = 0
    awaited: int = 0
    in_place: str = ""
    backfill: bool = False
    layout_check: pb.LayoutCheck.ValueType = pb.LAYOUT_CHECK_UNCHECKED
    live_check: pb.LiveCheck.ValueType = pb.LIVE_CHECK_UNSPECIFIED
    live_check_ns: int = 0

    @classmethod
    def committed(cls, commit: CommitRecord) -> VersionRecord:
        """Return the record of a version that lies in the store."""
        return cls(
            commit.model,
            commit.version,
            commit.epoch,
            dict(commit.metadata),
            durability=pb.DURABILITY_COMMITTED,
            commit=commit,
            client_run=commit.client_run,
            epoch_taken=commit.epoch_taken,
        )

    @property
    def chain(self) -> list[VersionRecord]:
        """The version and all that it is based on, down to one that is kept in full."""
        found = [self]
        while (base := found[-1].base) is not None:
            found.append(base)
        return found

    @property
    def local(self) -> bool:
        """This host alone has it: the checkpoint of a follower's engine, which its origin lacks."""
        return self.version >= FIRST_LOCAL and not self.push_id

    @property
    def order(self) -> int:
        """By this versions are ordered; what is local is older than all that has come."""
        return self.version - LOCAL_BEFORE if self.local else self.version

    @property
    def place(self) -> Residence:
        """Where the bytes lie, of a version that has a slot.

        Raises:
            WeightSyncError: FAULT; the server lost count.
        """
        if self.slot is None:
            raise WeightSyncError(Reason.FAULT, f"version {self.version} has no slot; call again")
        return self.slot

    @property
    def content_digest(self) -> str:
        """Identity of the content; empty while nobody may rely on it.

        A version that is not committed counts only while an engine serves or prepares it.
        """
        if self.commit is not None:
            return self.commit.content_digest
        relied_on = self.serving == pb.SERVING_LIVE or (self.slot is not None and self.slot.leases)
        return self.manifest.content_digest if self.manifest and relied_on else ""

    def sealed(
        self,
        manifest: Manifest,
        *,
        trainer_verified: bool,
        adopted: bool,
        delta: DeltaFacts | None = None,
    ) -> CommitRecord:
        """Return the commit record of this content, dated now."""
        layout = manifest.layout
        return CommitRecord(
            model=self.model,
            version=self.version,
            content_digest=manifest.content_digest,
            manifest_digest=manifest.manifest_digest,
            layout_digest=layout.digest,
            epoch=self.epoch,
            commit_time_ns=clock.wall_ns(),
            metadata=dict(self.metadata),
            size_bytes=layout.size,
            tensor_count=len(layout.tensors),
            shard_count=len(layout.shards),
            trainer_verified=trainer_verified,
            adopted=adopted,
            push_id=self.push_id,
            idempotency_key=self.key,
            client_run=self.client_run,
            epoch_taken=self.epoch_taken,
            **(asdict(delta) if delta is not None else {}),
        )

    def missing_text(self) -> str:
        """Tell what has not arrived; empty when nothing is known of it."""
        return ", ".join(self.missing()) if self.missing else ""

    def to_info(self) -> pb.VersionInfo:
        """Return the wire form of the present state."""
        refused = self.refused_reason if self.serving == pb.SERVING_NO else ""
        info = pb.VersionInfo(
            model=self.model,
            version=self.version,
            durability=self.durability,
            residency=pb.RESIDENCY_DEVICE if self.in_place else self.residency,
            serving=pb.SERVING_REJECTED if refused else self.serving,
            rejected_reason=self.rejected_reason or refused,
            epoch=self.epoch,
            metadata=self.metadata,
            pinned=self.pinned,
            layout_check=self.layout_check,
        )
        if self.serving == pb.SERVING_LIVE:
            info.live_check = self.live_check
            if self.live_check_ns:
                info.live_check_time.FromNanoseconds(self.live_check_ns)
        commit, manifest = self.commit, self.manifest
        if commit is not None:
            info.content_digest = commit.content_digest
            info.manifest_digest = commit.manifest_digest
            info.layout_digest = commit.layout_digest
            info.size_bytes = commit.size_bytes
            info.tensor_count = commit.tensor_count
            info.shard_count = commit.shard_count
            info.trainer_verified = commit.trainer_verified
            info.commit_time.FromNanoseconds(commit.commit_time_ns)
            info.kind = pb.PUSH_KIND_DELTA if self.base is not None else pb.PUSH_KIND_FULL
            info.base_version = self.base.version if self.base is not None else 0
            info.stored_bytes = commit.stored_bytes
            info.chain_length = len(self.chain) - 1
            info.changed_fraction = commit.changed_fraction
        elif manifest is not None:
            # Staged, not durable.
            info.content_digest = manifest.content_digest
            info.manifest_digest = manifest.manifest_digest
            info.layout_digest = manifest.layout.digest
            info.size_bytes = manifest.layout.size
            info.tensor_count = len(manifest.layout.tensors)
            info.shard_count = len(manifest.layout.shards)
        return info
