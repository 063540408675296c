"""Which failpoints there are, who comes by each, and what else must happen that somebody does."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = [
    "COMPANIONS",
    "IN_ENGINE",
    "STARTING",
    "SURVIVING",
    "in_fetcher",
    "in_ingest",
    "needs_engine",
    "placed",
    "wish",
]

_ROOT = Path(__file__).parents[2]
_CALL = re.compile(r"failpoints\.(?:hit|reach|lie)\(\s*\"([a-z0-9_.]+)\"")
#: What stands around the in-memory engine: the bridge's protocol and the engine's own points.
_BESIDE_MEMORY = ("weightsync/vllm/bridge/engine_servicer.py", "tests/soak/engine.py")

IN_ENGINE = ("worker.", "bridge.")
#: Met when a server starts, or by what it does first.
STARTING = (
    "store.recover",
    "journal.read",
    "apply.reconcile",
    "stage.allocate",
    "stage.load",
    "fetcher.load",
    "bridge.hello",
    "worker.capture",
    "worker.state",
    "worker.tell",
)
#: Met when a push goes on that was half done when the server died.
SURVIVING = ("receive.resume", "fetcher.restore")
#: Not faults but lies, or met only when the server is dead for longer than a pause lasts.
_LIES = ("worker.reply", "worker.tell", "worker.opinion", "bridge.replies", "bridge.expire")
#: Met only with tensors on a GPU, which a soak's trainers have none of.
_COLLECTING = ("receive.collect",)
#: Met only by ranks with a GPU, and by those of the in-memory engine.
_AHEAD = ("worker.ahead",)
#: Met only where a push brings tensors that the engine's checkpoint does not have.
_CHECKING = ("worker.check",)
#: Met only where vLLM's own transfer brings tensors.
_ARRIVING = ("worker.arrive",)
#: Met only with several engines or hosts, of which a soak has one.
_OF_SEVERAL = ("host.", "node.", "follow.", "fleet.")
#: Met only with probes, which a soak's trainers do not push.
_OF_GATES = ("gate.",)
_SCORING = ("bridge.score",)
_LEFT_OUT = (*_SCORING, *_LIES, *_COLLECTING, *_CHECKING, *_ARRIVING)

_LIE = "worker.reply=1*lie(content_digest)"
#: What must fail before it is met.
COMPANIONS = {
    "apply.restore": _LIE,
    "apply.restored": _LIE,
    "apply.fence": "worker.reply=2*lie(content_digest)",
    "bridge.fence": "worker.reply=2*lie(content_digest)",
    # A pause is renewed after a third of its lease.
    "bridge.renew": "apply.commit=1*sleep(2.5)",
    # A rank goes back where the switch has failed.
    "worker.restore": "worker.half=1*error(EIO)",
}

#: Who comes by: caller and act, by the beginning of the name; the first that fits.
_WISHES = {
    "store.epoch": "acquire",
    "store.marks": "pin",
    "store.delete": "delete",
    "stage.verify": "apply",
    "worker.verify": "verify",
    "worker.ahead": "push",
    "worker.vote": "switch",
    "worker.restore": "switch",
    "bridge.switch": "switch",
    "ingest.": "ingest",
    "receive.lend": "hand",
    "receive.written": "hand",
    "apply.": "apply",
    "journal.": "apply",
    "worker.": "apply",
    "bridge.": "apply",
    "receive.": "push",
    "commit.": "push",
    "store.": "push",
    "file.": "push",
    # Full versions are kept as they come; when a chain of deltas is folded, by this.
    "fetcher.persist": "delta",
    "fetcher.copy": "delta",
    "fetcher.inspect": "delta",
    "fetcher.": "push",
    "delta.": "delta",
}


def in_fetcher(point: str) -> bool:
    """Return whether a failpoint is met in a fetcher."""
    return point.startswith("fetcher.") or point == "delta.patch"


def in_ingest(point: str) -> bool:
    """Return whether a failpoint is met in an ingest process."""
    return point in ("ingest.chunk", "ingest.copied")


def needs_engine(point: str) -> bool:
    """Return whether nobody comes by a failpoint while there is no engine."""
    ours = ("apply.", "stage.", "fetcher.load", *IN_ENGINE)
    return wish(point) in ("apply", "switch", "verify") or point.startswith(ours)


def placed(*, vllm: bool) -> list[str]:
    """Return the failpoints that a soak can meet again and again."""
    found: set[str] = set()
    folders = ["server/weightsync_server", *(["weightsync"] if vllm else [])]
    paths = [path for folder in folders for path in (_ROOT / folder).rglob("*.py")]
    paths += [] if vllm else [_ROOT / path for path in _BESIDE_MEMORY]
    for path in paths:
        found.update(_CALL.findall(path.read_text()))
    met = found.difference(_LEFT_OUT, _AHEAD if vllm else ())
    return sorted(point for point in met if not point.startswith((*_OF_SEVERAL, *_OF_GATES)))


def wish(point: str) -> str:
    """Return the act of a caller that comes by a failpoint; empty: whatever they do."""
    return next((act for begin, act in _WISHES.items() if point.startswith(begin)), "")
