"""What engines of this host have refused for its content: nobody takes it for a default again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from weightsync_server.ops.tasks import in_thread, to_end
from weightsync_server.store.store_records import read_document, write_document

logger = logging.getLogger(__name__)

#: Contents that are remembered of one engine, and engines; the newest.
_CONTENTS, _ENGINES = 64, 64
#: Characters of a reason.
_REASON = 500


@dataclass
class _Engine:
    """What one engine has refused, the newest last, as long as it has the same model.

    `layout` is its checkpoint's signature, or "" if not known.
    """

    layout: str = ""
    contents: dict[str, str] = field(default_factory=dict)
    present: bool = False


class RefusedContents:
    """What every rank refuses for its content is refused again: it is known by engine and digest.

    It counts until the engine takes it all the same, somebody accepts it, or the engine comes with
    another model. An apply that names it asks the ranks again. `on_change` gets the digests of
    which something else is known.
    """

    def __init__(self, on_change: Callable[[Iterable[str]], None] = lambda _: None) -> None:
        self._on_change = on_change
        self._path: Path | None = None
        self._engines: dict[str, _Engine] = {}
        self._turn = asyncio.Lock()

    def open(self, path: Path) -> None:
        """Read what was known and keep it at `path`; a damaged file counts for nothing."""
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
            logger.warning("%s cannot be read, and is started over: %s", path, error)
        self._on_change(self._digests())

    async def seen(self, engine: str, checkpoint: str) -> None:
        """Note that an engine is there; with a checkpoint of another model it is another engine.

        `checkpoint` is the signature of the checkpoint that it has started on, not of a version
        that it serves, which may lack tensors; empty if it was not read, and the engine has not
        started since it was.
        """
        known = self._engines.setdefault(engine, _Engine())
        known.present = True
        if checkpoint and known.layout != checkpoint:
            gone, known.contents = known.contents, {}
            known.layout = checkpoint
            if gone:
                await self._changed(gone)

    def left(self, engine: str) -> None:
        if engine in self._engines:
            self._engines[engine].present = False
            self._on_change(self._digests())

    async def refuse(self, engine: str, digest: str, reason: str) -> None:
        known = self._engines.setdefault(engine, _Engine(present=True))
        known.contents.pop(digest, None)
        known.contents[digest] = reason[:_REASON]
        dropped = list(known.contents)[:-_CONTENTS]
        for old in dropped:
            del known.contents[old]
        await self._changed([digest, *dropped])

    async def take(self, engine: str, digest: str) -> None:
        known = self._engines.get(engine)
        if known is not None and known.contents.pop(digest, ""):
            await self._changed([digest])

    async def accept(self, digest: str) -> None:
        if [1 for one in self._engines.values() if one.contents.pop(digest, "")]:
            await self._changed([digest])

    def refused_by(self, engines: Iterable[str], digest: str) -> bool:
        return any(digest in self._engines[one].contents for one in engines if one in self._engines)

    def reason(self, digest: str) -> str:
        there = {name: one for name, one in self._engines.items() if one.present}
        reasons = {n: one.contents.get(digest, "") for n, one in (there or self._engines).items()}
        if not reasons or not all(reasons.values()):
            return ""
        name, reason = next(iter(reasons.items()))
        return f"engine {name} refused it: {reason}"

    def _digests(self) -> set[str]:
        return {digest for one in self._engines.values() for digest in one.contents}

    async def _changed(self, digests: Iterable[str]) -> None:
        self._on_change(digests)
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
                logger.critical(
                    "check the disk of the state directory: what engines refused is not recorded "
                    "(%s), so that after a restart they are asked to take it again",
                    error,
                )
