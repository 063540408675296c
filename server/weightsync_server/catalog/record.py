"""One version as the server knows it, and how clients are shown it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Protocol

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog import kept_probes
from weightsync_server.store.store_records import CommitRecord, DeltaFacts

if TYPE_CHECKING:
    from weightsync.model.manifest import Manifest
    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.in_place_push import InPlacePush


#: Half of all numbers: trainers do not come there one by one.
FIRST_LOCAL = 1 << 52
#: How the reason begins of what a gate has rejected: its content, whatever number it has.
BY_GATE = "by its gate: "
#: Subtracted from a local number, it stands below all others.
LOCAL_BEFORE = 1 << 53


def local_number(content_digest: str) -> int:
    """Return the number of content that has none elsewhere: the same wherever it is."""
    return FIRST_LOCAL + int(content_digest, 16) % FIRST_LOCAL


class Residence(Protocol):
    """Where the bytes of a version lie in shared memory; a slot is one.

    `leases` counts readers. While `writing`, the bytes are not final. `segments` are by shard
    index.
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
        epoch: Epoch of its writer; 0: adopted.
        rejected_reason: Why "newest" skips it; empty: it does not.
        hold_reason: Why the gate of an apply held it; empty: none did.
        refused_reason: Why every engine of this host refuses its content; empty: one may take it.
        pinned: It is never collected and keeps its slot.
        manifest: Only while it lies in a slot, verified: 37,000 tensors take about 15 MB.
        missing: While receiving: returns what has not arrived, at most 10 items.
        damaged: What is wrong with it in the store; empty: nothing that is known.
        epoch_taken: The run of the client that pushes it took the epoch.
        orphaned: Its push failed; it stays for as long as it is live or leased.
        base: The version whose bytes it is kept as a change of; None: it is kept in full.
        holds: Pushes of deltas that are based on it.
        awaited: Callers for whom it is being read, or who are about to get a lease.
        in_place: The push that brings it, where a trainer wrote it into an engine's memory, which
            has it alone until that was compared with it; None: it comes otherwise.
        backfill: Its number is from this server's origin, and may lie below numbers used here.
        layout_check: Whether the engine was asked if it takes such tensors.
        live_check: Whether every engine that serves it had its live parameters compared.
        live_check_ns: When they were, Unix time in nanoseconds; 0: they are to be.
        traceparent: The span of its push, as W3C Trace Context names it; "": it was not traced.
    """

    model: str
    version: int
    epoch: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    durability: pb.Durability.ValueType = pb.DURABILITY_RECEIVING
    residency: pb.Residency.ValueType = pb.RESIDENCY_ABSENT
    serving: pb.Serving.ValueType = pb.SERVING_NO
    rejected_reason: str = ""
    hold_reason: str = ""
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
    in_place: InPlacePush | None = None
    backfill: bool = False
    layout_check: pb.LayoutCheck.ValueType = pb.LAYOUT_CHECK_UNCHECKED
    live_check: pb.LiveCheck.ValueType = pb.LIVE_CHECK_UNSPECIFIED
    live_check_ns: int = 0
    traceparent: str = ""

    @classmethod
    def committed(cls, commit: CommitRecord) -> VersionRecord:
        return cls(
            commit.model,
            commit.version,
            commit.epoch,
            dict(commit.metadata),
            durability=pb.DURABILITY_COMMITTED,
            commit=commit,
            client_run=commit.client_run,
            epoch_taken=commit.epoch_taken,
            traceparent=commit.traceparent,
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
        """What versions are ordered by; what is local is older than all that has come."""
        return self.version - LOCAL_BEFORE if self.local else self.version

    @property
    def place(self) -> Residence:
        """Where the bytes lie, of a version that has a slot; else FAULT."""
        if self.slot is None:
            raise WeightSyncError(Reason.FAULT, f"version {self.version} has no slot; call again")
        return self.slot

    @property
    def content_digest(self) -> str:
        """Identity of the content; empty while nobody may rely on it.

        Before the commit, it counts only while an engine serves or prepares it.
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
        probes: str = "",
    ) -> CommitRecord:
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
            traceparent=self.traceparent,
            probes=probes,
            **(asdict(delta) if delta is not None else {}),
        )

    # Transitions. Nothing outside this module assigns a field; scripts/house.py checks it.

    def begin_push(self, epoch: int, metadata: Mapping[str, str], *, backfill: bool) -> None:
        self.epoch, self.metadata, self.backfill = epoch, dict(metadata), backfill

    def name_push(self, push_id: str, key: str) -> None:
        self.push_id, self.key = push_id, key

    def name_run(self, client_run: str, *, epoch_taken: bool) -> None:
        self.client_run, self.epoch_taken = client_run, epoch_taken

    def name_trace(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def wait_for(self, missing: Callable[[], list[str]]) -> None:
        self.missing = missing

    def renumber(self, number: int) -> None:
        """Give it its number, known only now; FAULT if it is not being received any more."""
        if self.durability != pb.DURABILITY_RECEIVING:
            raise WeightSyncError(
                Reason.FAULT,
                f"push version {number} again: its push ended before it had its number",
            )
        self.version = number

    def add_metadata(self, metadata: Mapping[str, str]) -> None:
        self.metadata.update(metadata)

    def base_on(self, base: VersionRecord | None) -> None:
        self.base = base

    def become_committed(self, commit: CommitRecord, base: VersionRecord | None) -> None:
        self.commit, self.base = commit, base
        self.durability = pb.DURABILITY_COMMITTED
        self.missing = None

    def become_whole(self, commit: CommitRecord) -> None:
        """Stand on no other version any more: the store keeps it in full."""
        self.commit, self.base = commit, None

    def fail(self) -> None:
        """Never become committed, unless it is reopened."""
        self.durability = pb.DURABILITY_FAILED
        self.missing = None

    def lose(self) -> None:
        """Fail while its push, or the only copy of it, may still be named."""
        self.durability = pb.DURABILITY_FAILED

    def recover(self) -> None:
        """Be committed again, for its bytes have come once more."""
        self.durability = pb.DURABILITY_COMMITTED

    def orphan(self) -> None:
        """Stay without a push for as long as it is live or leased."""
        self.orphaned = True

    def end_orphan(self) -> None:
        self.orphaned = False

    def reopen(self, epoch: int) -> None:
        """Be received again, its bytes having been stored anew: failed becomes receiving."""
        self.orphaned = False
        self.durability = pb.DURABILITY_RECEIVING
        self.epoch = epoch

    def occupy(self, slot: Residence | None) -> None:
        self.slot = slot

    def begin_staging(self) -> None:
        self.residency = pb.RESIDENCY_STAGING

    def become_staged(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.residency = pb.RESIDENCY_STAGED
        self.place.settle()

    def evict(self) -> None:
        self.manifest = None
        self.residency = pb.RESIDENCY_ABSENT

    def leave_memory(self) -> None:
        """Be absent while its manifest is still known."""
        self.residency = pb.RESIDENCY_ABSENT

    def go_live(self) -> None:
        self.served = True

    def serve(self, *, live: bool) -> None:
        if live:
            self.serving = pb.SERVING_LIVE
        elif self.rejected_reason:
            self.serving = pb.SERVING_REJECTED
        else:
            self.serving = pb.SERVING_HELD if self.hold_reason else pb.SERVING_NO

    def mark(self, *, pinned: bool, rejected_reason: str, hold_reason: str = "") -> None:
        self.pinned, self.rejected_reason = pinned, rejected_reason
        self.hold_reason = hold_reason

    def refuse(self, reason: str) -> None:
        self.refused_reason = reason

    def compare(self, outcome: pb.LiveCheck.ValueType, at_ns: int) -> None:
        self.live_check, self.live_check_ns = outcome, at_ns

    def check_layout(self, outcome: pb.LayoutCheck.ValueType) -> None:
        self.layout_check = outcome

    def damage(self, why: str) -> None:
        self.damaged = why

    def end_in_place(self) -> InPlacePush | None:
        """Come as any other version does from now on; return the push that was to bring it."""
        push, self.in_place = self.in_place, None
        return push

    def retain(self) -> None:
        self.holds += 1

    def let_go(self) -> None:
        self.holds -= 1

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Be in use within the block: nobody deletes it, nor takes its slot."""
        self.awaited += 1
        try:
            yield
        finally:
            self.awaited -= 1

    # What is told of it.

    def missing_text(self) -> str:
        return ", ".join(self.missing()) if self.missing else ""

    def to_info(self) -> pb.VersionInfo:
        refused = self.refused_reason if self.serving == pb.SERVING_NO else ""
        info = pb.VersionInfo(
            model=self.model,
            version=self.version,
            durability=self.durability,
            residency=pb.RESIDENCY_DEVICE if self.in_place else self.residency,
            serving=pb.SERVING_REJECTED if refused else self.serving,
            rejected_reason=self.rejected_reason or self.hold_reason or refused,
            epoch=self.epoch,
            metadata=self.metadata,
            pinned=self.pinned,
            layout_check=self.layout_check,
            client_run=self.client_run,
            traceparent=self.traceparent,
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
            info.probe_count = kept_probes.count(commit.probes)
        elif manifest is not None and not self.in_place:
            # Staged, not durable; of what is pushed in place nobody knows yet if it is served.
            info.content_digest = manifest.content_digest
            info.manifest_digest = manifest.manifest_digest
            info.layout_digest = manifest.layout.digest
            info.size_bytes = manifest.layout.size
            info.tensor_count = len(manifest.layout.tensors)
            info.shard_count = len(manifest.layout.shards)
        return info
