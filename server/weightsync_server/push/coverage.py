"""Whether the boxes of all writers are each element of each tensor exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.boxes import problem_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from weightsync.model.boxes import Box
    from weightsync.model.manifest import TensorEntry
    from weightsync_server.push.box_upload import BoxUpload, TensorBox

__all__ = ["check_boxes", "check_cover"]


def check_cover(
    tensors: Sequence[TensorEntry], uploads: Collection[BoxUpload], *, partial: bool = False
) -> None:
    """Refuse boxes of which an element is in none or in two, or a replica that nobody sends.

    Args:
        tensors: Of one shard.
        uploads: What each writer declared of it.
        partial: A tensor of which nobody sends a box is none of the push.

    Raises:
        WeightSyncError: LAYOUT_INVALID, naming the writers.
    """
    boxes: list[list[Box]] = [[] for _ in tensors]
    senders: dict[TensorBox, int] = {}
    ordered = sorted(uploads, key=lambda upload: upload.writer)
    for upload in ordered:
        for one in upload.sent:
            if one not in senders:
                boxes[one.tensor].append(one.box)
            elif senders[one] == upload.writer and one.box.elements:
                raise _refused(
                    f"writer {upload.writer} sends {_named(tensors, one)} twice", upload.writer
                )
            # One that others send as well is a replica that knows it not.
            senders.setdefault(one, upload.writer)
    for position, tensor in enumerate(tensors):
        if partial and not boxes[position]:
            continue
        if problem := problem_of(tensor.shape, boxes[position]):
            holders = sorted(
                {upload.writer for upload in ordered for box in upload.sent if box[0] == position}
            )
            who = f"which writers {', '.join(map(str, holders))} send" if holders else "of nobody"
            raise _refused(
                f"tensor {tensor.name[:100]!r}, {who}, does not come whole: {problem}; every "
                "element is sent by exactly one writer"
            )
    for upload in ordered:
        for one in upload.replicas:
            sender = senders.get(one)
            if one.box.elements and (sender is None or sender >= upload.writer):
                raise _refused(
                    f"writer {upload.writer} holds a replica of {_named(tensors, one)}, which no "
                    "lower writer sends; push all of it in the same boxes",
                    upload.writer,
                )


def check_boxes(
    tensors: Sequence[TensorEntry],
    uploads: Collection[BoxUpload],
    found: Mapping[TensorBox, bytes],
) -> None:
    """Compare the digests that writers gave with those of what lies in memory.

    Args:
        tensors: Of one shard.
        uploads: What each writer declared and gave of it.
        found: Digest of each box that is sent, but for those of which no writer gave one.

    Raises:
        WeightSyncError: DIGEST_MISMATCH, naming the writers.
    """
    first: dict[TensorBox, tuple[int, bytes]] = {}
    for writer, one, digest in _claims(uploads, found):
        other, theirs = first.setdefault(one, (writer, digest))
        if digest != theirs:
            raise _mismatch(
                tensors,
                one,
                writer,
                f"writers {other} and {writer} are to hold the same, but the bytes of "
                f"{_named(tensors, one)} differ",
            )
    # Of two that differ it is chance whose bytes lie there: each other's digests come first.
    for one, (writer, digest) in first.items():
        if digest != found[one]:
            raise _mismatch(
                tensors,
                one,
                writer,
                f"the bytes of {_named(tensors, one)} arrived from writer {writer} with another "
                "digest than it computed",
            )


def _claims(
    uploads: Collection[BoxUpload], found: Mapping[TensorBox, bytes]
) -> Iterator[tuple[int, TensorBox, bytes]]:
    """Yield which writer says what of which box, the lowest writer first."""
    for upload in sorted(uploads, key=lambda upload: upload.writer):
        declared = upload.sent + upload.replicas
        for one, given in zip(declared, upload.given, strict=True):
            # Where none was given, the server itself has read the box.
            digest = given or found.get(one)
            if one.box.elements and digest is not None:
                yield upload.writer, one, digest


def _mismatch(
    tensors: Sequence[TensorEntry], one: TensorBox, writer: int, problem: str
) -> WeightSyncError:
    return WeightSyncError(
        Reason.DIGEST_MISMATCH,
        f"{problem}; push the version again",
        metadata={"tensor": tensors[one.tensor].name[:200], "writer": str(writer)},
    )


def _named(tensors: Sequence[TensorEntry], one: TensorBox) -> str:
    return f"{one.box} of tensor {tensors[one.tensor].name[:100]!r}"


def _refused(message: str, writer: int | None = None) -> WeightSyncError:
    metadata = {} if writer is None else {"writer": str(writer)}
    return WeightSyncError(Reason.LAYOUT_INVALID, message, metadata=metadata)
