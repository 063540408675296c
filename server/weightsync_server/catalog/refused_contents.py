"""What engines of this host have refused for its content: nobody takes it for a default again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync_server.ops.tasks import in_thread, to_end
from weightsync_server.store.documents import read_document, write_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["RefusedContents"]

logger = logging.getLogger(__name__)

#: Contents that are remembered of one engine, and engines; the newest.
_CONTENTS, _ENGINES = 64, 64
#: Characters of a reason.
_REASON = 500


@dataclass
class _Engine:
    """What one engine has refused, the newest last, as long as it has the same model.

    Attributes:
        layout: Signature of the tensors of its own checkpoint; empty: not known.
        contents: Reason by content digest.
        present: Whether it is there.
    """

    layout: str = ""
    contents: dict[str, str] = field(default_factory=dict)
    present: bool = False


class RefusedContents:
    """What every rank refuses for its content is refused again: it is known by engine and digest.

    It counts until the engine takes it all the same, somebody accepts it, or the engine comes with
    another model. An apply that names it asks the ranks again.

    Attributes:
        on_change: Called with the digests of which something else is known now.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[Iterable[str]], None] = lambda _: None
        self._path: Path | None = None
        self._engines: dict[str, _Engine] = {}
        self._turn = asyncio.Lock()

    def open(self, path: Path) -> None:
        """Read what was known, and write what will be there.

        A damaged file counts for nothing: the ranks are asked before anything is written.
        """
        self._path = path
        try:
            found = read_document(path)
            self._engines = {
                str(name): _Engine(
                    str(one["layout"]), {str(k): str(v) for k, v in one["contents"].items()}
                )
                for name, one in found["engines"].items()
            }
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s cannot be read, and is begun anew: %s", path, error)
        self.on_change(self._digests())

    async def seen(self, engine: str, checkpoint: str) -> None:
        """Take note that an engine is there; with a checkpoint of another model it is another.

        Args:
            engine: Its name.
            checkpoint: Signature of the tensors of the checkpoint that it has started on, and not
                of a version that it serves: those may leave tensors out. Empty: it was not read,
                and has not started since it was.
        """
        known = self._engines.setdefault(engine, _Engine())
        known.present = True
        if checkpoint and known.layout != checkpoint:
            gone, known.contents = known.contents, {}
            known.layout = checkpoint
            if gone:
                await self._changed(gone)

    def left(self, engine: str) -> None:
        """Take note that an engine is gone; it may come back."""
        if engine in self._engines:
            self._engines[engine].present = False
            self.on_change(self._digests())

    async def refuse(self, engine: str, digest: str, reason: str) -> None:
        """Take note that every rank of an engine refuses a content; persisted."""
        known = self._engines.setdefault(engine, _Engine(present=True))
        known.contents.pop(digest, None)
        known.contents[digest] = reason[:_REASON]
        dropped = list(known.contents)[:-_CONTENTS]
        for old in dropped:
            del known.contents[old]
        await self._changed([digest, *dropped])

    async def take(self, engine: str, digest: str) -> None:
        """Take note that an engine takes a content."""
        known = self._engines.get(engine)
        if known is not None and known.contents.pop(digest, ""):
            await self._changed([digest])

    async def accept(self, digest: str) -> None:
        """Forget that any engine has refused a content."""
        if [1 for one in self._engines.values() if one.contents.pop(digest, "")]:
            await self._changed([digest])

    def refused_by(self, engines: Iterable[str], digest: str) -> bool:
        """Whether one of these engines has refused a content."""
        return any(digest in self._engines[one].contents for one in engines if one in self._engines)

    def reason(self, digest: str) -> str:
        """Return why every engine of this host refuses a content; "": one may take it."""
        there = {name: one for name, one in self._engines.items() if one.present}
        reasons = {n: one.contents.get(digest, "") for n, one in (there or self._engines).items()}
        if not reasons or not all(reasons.values()):
            return ""
        name, reason = next(iter(reasons.items()))
        return f"engine {name} refused it: {reason}"

    def _digests(self) -> set[str]:
        return {digest for one in self._engines.values() for digest in one.contents}

    async def _changed(self, digests: Iterable[str]) -> None:
        self.on_change(digests)
        if self._path is not None:
            # Also for who is cancelled while it waits for its turn.
            await to_end(asyncio.ensure_future(self._write(self._path)))

    async def _write(self, path: Path) -> None:
        async with self._turn:
            # As of now: what was written last is what counts.
            kept = [(name, one) for name, one in self._engines.items() if one.contents][-_ENGINES:]
            engines = {
                name: {"layout": one.layout, "contents": dict(one.contents)} for name, one in kept
            }
            try:
                await in_thread(write_document, path, {"engines": engines})
            except OSError as error:
                # The ranks refuse it again, if it comes to that.
                logger.critical("what engines have refused is not written down: %s", error)
