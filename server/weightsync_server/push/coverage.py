"""Whether the boxes of all writers are each element of each tensor exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.boxes import problem_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from weightsync.model.boxes import Box
    from weightsync.model.manifest import TensorEntry
    from weightsync_server.push.box_upload import BoxUpload, TensorBox

__all__ = ["check_boxes", "check_cover"]


def check_cover(tensors: Sequence[TensorEntry], uploads: Collection[BoxUpload]) -> None:
    """Refuse boxes of which an element is in none or in two, or a replica that nobody sends.

    Args:
        tensors: Of one shard.
        uploads: What each writer declared of it.

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
    for upload in sorted(uploads, key=lambda upload: upload.writer):
        declared = upload.sent + upload.replicas
        for one, given in zip(declared, upload.given, strict=True):
            if not one.box.elements:
                continue
            # Where none was given, the server itself has read the box.
            digest = given or found.get(one)
            if digest is None:
                continue
            other, theirs = first.setdefault(one, (upload.writer, digest))
            what = f"the bytes of {_named(tensors, one)}"
            if digest != theirs:
                problem = f"writers {other} and {upload.writer} are to hold the same, but {what} "
                problem += "differ"
            elif digest != found[one]:
                problem = f"{what} arrived from writer {upload.writer} with another digest than it "
                problem += "computed"
            else:
                continue
            raise WeightSyncError(
                Reason.DIGEST_MISMATCH,
                f"{problem}; push the version again",
                metadata={
                    "tensor": tensors[one.tensor].name[:200],
                    "writer": str(upload.writer),
                },
            )


def _named(tensors: Sequence[TensorEntry], one: TensorBox) -> str:
    return f"{one.box} of tensor {tensors[one.tensor].name[:100]!r}"


def _refused(message: str, writer: int | None = None) -> WeightSyncError:
    metadata = {} if writer is None else {"writer": str(writer)}
    return WeightSyncError(Reason.LAYOUT_INVALID, message, metadata=metadata)
