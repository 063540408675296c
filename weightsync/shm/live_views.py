"""Where the tensors of a checkpoint lie in the live memory of one rank, as who attaches reads it.

A rank offers files over the segment socket: first `DOCUMENT`, this as JSON, then its memory. On a
CPU that is a writable descriptor of each allocation; of a GPU it is one file, `HANDLES`, with what
`cuIpcGetMemHandle` answered for each. A handle opens its allocation to whoever has its bytes, so
they are in that file, which lies nowhere and is handed over as a descriptor, and in no document.

That memory of the host can be read only. For a block of a transaction a rank offers, without a
document, a descriptor of each allocation that can be written, or the `GATE` of its GPU (see
`live_writers`), which whoever writes there has open meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Names of the files that a rank offers.
DOCUMENT, MEMORY, HANDLES, GATE = "document", "memory", "handles", "gate"
#: CU_IPC_HANDLE_SIZE
HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class LiveBox:
    """A part of a tensor that lies in a rank's memory, counted in elements.

    `dtype` is what is live and `stored` what the version has; `shape` is of the whole tensor. The
    first element lies at byte `begin` of allocation `memory`, the next ones `stride` apart.
    """

    tensor: str
    dtype: str
    stored: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    stride: tuple[int, ...]
    memory: int
    begin: int


@dataclass(frozen=True, slots=True)
class LiveViews:
    """What one rank, `dp/pp/tp`, hands out.

    `device` is its GPU's UUID (16 bytes), or empty for the host's memory. `checkpoint` is name or
    path of what the engine has loaded, `config` its `config.json`.
    """

    rank: str
    device: bytes
    checkpoint: str
    config: Mapping[str, Any]
    boxes: tuple[LiveBox, ...]

    def to_json(self) -> bytes:
        boxes = [list(asdict(box).values()) for box in self.boxes]
        return json.dumps(
            {
                "rank": self.rank,
                "device": self.device.hex(),
                "checkpoint": self.checkpoint,
                "config": dict(self.config),
                "boxes": boxes,
            }
        ).encode()

    @classmethod
    def from_json(cls, data: bytes) -> LiveViews:
        """Raise ValueError where there is no document."""
        try:
            found = json.loads(data)
            return cls(
                str(found["rank"]),
                bytes.fromhex(found["device"]),
                str(found["checkpoint"]),
                dict(found["config"]),
                tuple(map(_box, found["boxes"])),
            )
        except (KeyError, TypeError) as error:
            msg = f"a rank describes its memory in an unknown format ({error!r})"
            raise ValueError(msg) from error


def _box(values: list[Any]) -> LiveBox:
    tensor, dtype, stored, shape, offsets, lengths, stride, memory, begin = values
    return LiveBox(
        str(tensor),
        str(dtype),
        str(stored),
        _dims(shape),
        _dims(offsets),
        _dims(lengths),
        _dims(stride),
        int(memory),
        int(begin),
    )


def _dims(values: list[Any]) -> tuple[int, ...]:
    return tuple(map(int, values))
