"""Named places at which a test makes this process fail.

Off unless WEIGHTSYNC_FAILPOINTS is set, and then every process that inherits the variable has them:
server, fetchers, bridge and workers. Its value is either a plan or `@` and the path of a file that
holds one, which is read again whenever it changes. A plan is a list of

    NAME=[SKIP>][COUNT*]ACTION[(ARGUMENT)]

separated by `;` or new lines: from hit SKIP+1 on, COUNT times (default: always), do ACTION:

    panic           die at once, by SIGKILL
    stop            stop, by SIGSTOP; another process continues or kills it
    sleep(SECONDS)  block this thread, or this task in `reach`
    error(ERRNO)    raise OSError; ERRNO by name, default EIO
    lie(TEXT)       the code at the point decides what to falsify

With a file, each time an action is taken its line `NAME ACTION PID` is appended to `<file>.hits`
first, so that a test knows which faults were met, also after a panic. Without one, this process
remembers them. The notation follows gofail
(https://github.com/etcd-io/gofail).
"""

from __future__ import annotations

import collections
import errno
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

VARIABLE = "WEIGHTSYNC_FAILPOINTS"

#: Every failpoint and where it is. A plan with another name is refused; a test finds each name once
#: in the code.
POINTS: Mapping[str, str] = MappingProxyType(
    {
        "receive.begin": "a push was asked for, nothing was done yet",
        "receive.layout": "a layout part arrived",
        "receive.chunk": "a chunk was copied into its segment",
        "receive.header": "the bytes of a shard's header are here",
        "receive.lend": "a trainer on this host asks for the memory of a shard",
        "receive.collect": "a trainer on this host asks for a shard to be copied from its GPU",
        "receive.written": "it has reported that the whole shard is there",
        "receive.shard": "the last byte of a shard is here",
        "receive.record": "before an open push is written down, so that it survives a crash",
        "receive.keep": "before received bytes are made durable and acknowledged as such",
        "receive.resume": "a push that survived a crash is taken up again",
        "ingest.claim": "before an ingest process is given the memory of a shard",
        "ingest.chunk": "before an ingest process copies a chunk into its segment",
        "ingest.copied": "an ingest process has copied it and not said so",
        "ingest.wrote": "before what an ingest process has copied counts as received",
        "commit.seal": "before the manifest is made",
        "commit.store": "before the store commits",
        "commit.reply": "the version is committed, the answer is not sent",
        "file.write": "before any small file is written",
        "file.fsync": "before any fsync",
        "file.rename": "before any rename",
        "file.flush_directory": "before any fsync of a directory",
        "store.manifest": "before the manifest is written",
        "store.record": "before the commit record is written",
        "store.recorded": "the commit record is durable",
        "store.epoch": "before an epoch is written",
        "store.marks": "before marks are written",
        "store.delete": "before the commit record of a deleted version is removed",
        "store.deleted": "the record of a deleted version is gone, its files are not",
        "store.recover": "before a version is recovered at start",
        "fetcher.task": "a fetcher has taken a task",
        "fetcher.digest": "before a fetcher digests",
        "fetcher.persist": "before a fetcher writes a shard",
        "fetcher.keep": "before a fetcher makes bytes of an arriving shard durable",
        "fetcher.kept": "those bytes are durable, but the list beside them does not say so",
        "fetcher.restore": "before a fetcher reads back what was kept of a shard",
        "fetcher.load": "before a fetcher reads a shard",
        "fetcher.copy": "before a fetcher copies a shard of another version",
        "fetcher.inspect": "before a fetcher checks a delta shard",
        "fetcher.reply": "a fetcher has done a task and not said so",
        "delta.patch": "before a fetcher changes a shard as a delta says",
        "delta.patched": "a version was made of a delta, nothing of it is proved",
        "delta.fold": "the whole shards of a delta are durable, its record does not name them",
        "delta.folded": "the record names the whole shards, the delta's are still there",
        "follow.fetch": "a follower is about to open the push of a version",
        "follow.shard": "before a follower has a shard read from a store",
        "follow.chunk": "a message of a version has arrived from the server that is followed",
        "stage.allocate": "before memory for a segment is reserved",
        "stage.load": "before a version is read back from the store",
        "stage.verify": "before a staged version is digested again",
        "node.stage": "a node was asked to stage a version and has done nothing",
        "node.chunk": "before a node copies a chunk of a version into its memory",
        "node.staged": "a node has a version, proved, and has not said so",
        "node.report": "before a node passes on what one of its ranks reports",
        "apply.begin": "an apply begins",
        "apply.prepared": "every rank is ready, nothing is paused",
        "apply.intent": "before INTENT is written",
        "apply.pause": "INTENT is durable, before the pause",
        "apply.commit": "generation is paused, before the commit",
        "apply.committed": "every rank has answered the commit",
        "gate.score": "every rank is proved, before its probes are scored",
        "gate.scored": "the probes are scored, what they mean is not written down",
        "gate.refused": "what is live is refused, which is written down, and is not left",
        "gate.score_live": "generation runs on the new version, before its probes are scored",
        "gate.decide": "before it is written down that the probes let the version go",
        "gate.decided": "that is durable, generation still stands",
        "apply.restore": "before the old version is restored",
        "apply.restored": "the old version is restored and proved, generation still stands",
        "apply.fence": "before the engine is fenced",
        "apply.resume": "before the resume",
        "apply.resumed": "generation runs on the new version, DONE is not written",
        "apply.done": "DONE is durable",
        "apply.reconcile": "before an engine is reconciled",
        "in_place.begin": "INTENT of a transaction is durable, before the pause",
        "in_place.begun": "every rank is unproved, the trainer may not write yet",
        "in_place.commit": "all is written, before ranks digest it",
        "in_place.resume": "every rank has digested it, before the resume",
        "in_place.live": "the engine generates on what was written, which is not pushed",
        "in_place.copied": "it is pushed, its INTENT is durable, before ranks compare",
        "in_place.proved": "every rank is proved to hold what was pushed",
        "in_place.restore": "before the version before a transaction is restored",
        "host.intent": "engines are ready, before the INTENT for all of them is written",
        "host.still": "all engines are paused, none is written",
        "host.decide": "all engines are proved, before COMMIT is written",
        "host.decided": "COMMIT is durable, no engine has resumed",
        "host.done": "the DONE for all engines is durable",
        "fleet.planned": "a fleet's plan is there, nothing is decided",
        "fleet.coordinate": "before a coordinator decides",
        "fleet.coordinated": "a coordinator has decided",
        "fleet.decide": "before any member creates a decision",
        "fleet.decided": "a decision is there, this process has not acted on it",
        "fleet.prepare": "before a member has its host prepare",
        "fleet.pause": "a member has written down that it stops, its host serves",
        "fleet.paused": "a member's host is paused, and the member has not said so",
        "fleet.commit": "a member knows of COMMIT, its host has not been asked",
        "fleet.committed": "a member's host has committed, and the member has not said so",
        "journal.write": "before a journal entry is written",
        "journal.read": "before the journal is read at start",
        "worker.capture": "before a load plan is captured",
        "worker.arrive": "before a tensor that a transfer of vLLM's own brought is kept",
        "worker.check": "before tensors of a layout are checked against the model",
        "worker.ahead": "a rank's thread has begun to read an arriving version",
        "worker.prepare": "a rank's prepare thread has begun",
        "worker.map": "before a rank maps segments",
        "worker.commit": "before a rank's first write",
        "worker.patch": "before a rank writes the first element that changes, and only those",
        "worker.load": "a rank was asked to load a version beside generation",
        "worker.store": "a rank lets its loader fill the arena",
        "loader.start": "a loader begins, before it has read vLLM's configuration",
        "loader.load": "a loader begins to load a version",
        "loader.loaded": "a loader has loaded a version, the arena holds the one before",
        "loader.stored": "a loader has filled the arena and not digested it",
        "loader.digests": "a loader reports the digests of the arena; lie: false ones",
        "worker.half": "a rank has written half of its slices",
        "worker.written": "a rank has written all, nothing is proved",
        "worker.verify": "before live parameters are compared",
        "worker.state": "before a rank reports what it holds",
        "worker.release": "before a rank releases versions",
        "worker.unprove": "before a rank takes what it holds for nothing proved",
        "worker.digest": "before a rank digests what another process has written",
        "worker.vote": "before a rank reports to the others what it holds, in a switch",
        "worker.opinion": "what it answers them: lie(no)",
        "worker.restore": "before a rank puts the old version back, in a switch",
        "worker.reply": "a rank's reply to a commit or a switch: lie(FIELD) or lie(FIELD=VALUE) "
        "falsifies it",
        "worker.tell": "a rank's reply to what it holds: as worker.reply",
        "bridge.hello": "a server said hello",
        "bridge.pause": "before vLLM is asked to pause",
        "bridge.paused": "vLLM is paused, the answer is not sent",
        "bridge.score": "before vLLM is asked to score sequences",
        "bridge.switch": "before vLLM is asked to switch between two steps",
        "bridge.switched": "the ranks have switched, the answer is not sent",
        "bridge.call": "before a worker call",
        "bridge.replies": "the workers' replies: lie(twice), lie(lost) or lie(stale)",
        "bridge.called": "the workers have answered, the answer is not sent",
        "bridge.renew": "before a lease is prolonged",
        "bridge.expire": "a lease has run out",
        "bridge.resume": "before vLLM is asked to resume",
        "bridge.resumed": "vLLM generates, the answer is not sent",
        "bridge.fence": "before vLLM is fenced",
    }
)

#: Actions that are told, newest last.
_MOST_HITS = 10_000
#: What `hit` and `reach` do; `lie` leaves it to the code at the point.
_DEEDS = ("panic", "stop", "sleep", "error")
_TERM = re.compile(
    r"(?P<name>[a-z0-9_.]+)=(?:(?P<skip>\d{1,9})>)?(?:(?P<count>\d{1,9})\*)?"
    r"(?P<action>panic|stop|sleep|error|lie)(?:\((?P<argument>[^()]*)\))?"
)


class FailpointError(ValueError):
    """A plan that cannot be followed; its text is one sentence."""


@dataclass
class _Term:
    action: str
    argument: str
    skip: int
    count: int | None
    hits: int = 0

    def due(self) -> bool:
        self.hits += 1
        if self.hits <= self.skip:
            return False
        return self.count is None or self.hits <= self.skip + self.count


def parse(plan: str) -> dict[str, _Term]:
    """Return what a plan says, by failpoint.

    Raises FailpointError when a term is malformed or names an unknown one.
    """
    terms = {}
    for text in re.split(r"[;\n]", plan):
        if not text.strip():
            continue
        match = _TERM.fullmatch(text.strip())
        if match is None:
            raise FailpointError(f"{text.strip()!r} is not NAME=[SKIP>][COUNT*]ACTION[(ARGUMENT)]")
        if match["name"] not in POINTS:
            raise FailpointError(f"no failpoint {match['name']!r}; use one of {', '.join(POINTS)}")
        term = _Term(
            match["action"],
            match["argument"] or "",
            int(match["skip"] or 0),
            int(match["count"]) if match["count"] else None,
        )
        _check(match["name"], term)
        terms[match["name"]] = term
    return terms


def _check(name: str, term: _Term) -> None:
    if term.action == "sleep":
        try:
            seconds = float(term.argument)
        except ValueError:
            seconds = -1
        if not 0 <= seconds <= 3600:
            raise FailpointError(f"{name}: sleep({term.argument}) is not 0 to 3600 seconds")
    if term.action == "error" and not hasattr(errno, term.argument or "EIO"):
        raise FailpointError(f"{name}: no errno {term.argument!r}; use a name such as ENOSPC")


class _Plan:
    def __init__(self, value: str) -> None:
        self._lock = threading.Lock()
        self._path = Path(value[1:]) if value.startswith("@") else None
        self._stamp: tuple[int, int, int] | None = None
        self._text = "" if self._path else value
        self._terms = parse(self._text)
        self._hits: collections.deque[str] = collections.deque(maxlen=_MOST_HITS)

    def text(self) -> str:
        if self._path is None:
            return self._text
        return self._path.read_text() if self._path.exists() else ""

    def replace(self, text: str) -> None:
        terms = parse(text)
        with self._lock:
            if self._path is None:
                self._text, self._terms = text, terms
                return
            # Not in place: another process must never read half a plan.
            fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            fresh.write_text(text)
            fresh.replace(self._path)

    def hits(self) -> list[str]:
        if self._path is None:
            return list(self._hits)
        file = Path(f"{self._path}.hits")
        return file.read_text().splitlines()[-_MOST_HITS:] if file.exists() else []

    def take(self, name: str, *actions: str) -> _Term | None:
        """Return what is due at a point now, if it is one of the actions."""
        with self._lock:
            self._refresh()
            term = self._terms.get(name)
            if term is None or term.action not in actions or not term.due():
                return None
            self._record(name, term)
            return term

    def _refresh(self) -> None:
        if self._path is None:
            return
        try:
            status = self._path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp != self._stamp:
                self._terms, self._stamp = parse(self._path.read_text()), stamp
        except FileNotFoundError:
            self._terms, self._stamp = {}, None

    def _record(self, name: str, term: _Term) -> None:
        line = f"{name} {term.action} {os.getpid()}\n".encode()
        if self._path is None:
            self._hits.append(line.decode().strip())
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(f"{self._path}.hits", flags, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


_plan: _Plan | None = _Plan(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def enabled() -> bool:
    """Whether this process was started with failpoints."""
    return _plan is not None


def plan() -> str:
    """Return the plan in force; "" where nothing fails."""
    return _plan.text() if _plan else ""


def set_plan(text: str) -> None:
    """Replace the plan: that of the file, for all who share it, or that of this process.

    Raises:
        FailpointError: It cannot be followed, or this process was started without failpoints.
        OSError: The file cannot be written.
    """
    if _plan is None:
        raise FailpointError(f"this process has no failpoints; start it with {VARIABLE}")
    _plan.replace(text)


def hits() -> list[str]:
    """Return a line `NAME ACTION PID` per action that was taken, oldest first."""
    return _plan.hits() if _plan else []


def hit(name: str) -> None:
    """Do what the plan says at this point of a thread; raises OSError when it says error."""
    term = _plan and _plan.take(name, *_DEEDS)
    if not term:
        return
    if term.action == "sleep":
        time.sleep(float(term.argument))
    else:
        _act(name, term)


async def reach(name: str) -> None:
    """Do what `hit` does at this point of a task; a sleep lets other tasks go on."""
    term = _plan and _plan.take(name, *_DEEDS)
    if not term:
        return
    if term.action == "sleep":
        # Not at the top: fetchers start without it.
        import asyncio

        await asyncio.sleep(float(term.argument))
    else:
        _act(name, term)


def lie(name: str) -> str | None:
    """Return the text of a lie that is due at this point, or None."""
    if _plan is None:
        return None
    term = _plan.take(name, "lie")
    return term.argument if term else None


def _act(name: str, term: _Term) -> None:
    if term.action == "panic":
        os.kill(os.getpid(), signal.SIGKILL)
        # The signal may reach another thread first.
        time.sleep(60)
    if term.action == "stop":
        # To this thread: one for the process may reach another first, and this one goes on a while.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return
    code = getattr(errno, term.argument or "EIO")
    raise OSError(code, f"{os.strerror(code)} (failpoint {name})")
