"""What the app asks of extensions that have calls of their own, or answer HTTP requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from weightsync_server.auth import Endpoint
    from weightsync_server.auth.caller import UseCase
    from weightsync_server.http.http_calls import HttpCalls
    from weightsync_server.http.http_messages import Verb
    from weightsync_server.ops.disk_watch import DataFolder


class ExtensionSettings(Protocol):
    """A group of settings of an extension, and what must be known before that is started."""

    def check(self, fleet: str, origin: str, engines: Sequence[str]) -> None:
        """Refuse with ValueError what could never work.

        `origin` is what the server follows, or whose node it is. Its `engines` have names.
        """

    def endpoints(self, run_dir: Path) -> Sequence[Endpoint]:
        """Return where the server listens for it, beside the addresses of the settings."""

    def folders(self) -> Sequence[DataFolder]:
        """Return what it writes to, and may fill up."""


class ExtensionHome(NamedTuple):
    """What a service may know of the server that it is in; `identity` names it for ever."""

    run_dir: Path
    state_dir: Path
    identity: str


class ExtraService(Protocol):
    """A service beside the server's own, served from the first call on, and started after that."""

    def use_cases(self) -> Mapping[str, UseCase]:
        """Return what serves its methods, by their exact paths."""

    def verbs(self, calls: HttpCalls, model: str) -> Mapping[str, Verb]:
        """Return what it answers over HTTP, by path."""

    async def start(self) -> None:
        """Begin to work, when the server can be reached."""

    async def stop(self, longest_s: float) -> None:
        """End what it does; calls under way get so many seconds."""


class HttpVerbs(Protocol):
    """Answers HTTP requests to paths of its own."""

    @property
    def verbs(self) -> Mapping[str, Verb]:
        """What it answers, by path."""

    async def close(self, grace_s: float) -> None:
        """End what it does; what is under way gets so many seconds."""


class MakeHttpVerbs(Protocol):
    """Returns verbs, which call methods of ours and read files below some folders."""

    def __call__(self, calls: HttpCalls, model: str, roots: Sequence[Path]) -> HttpVerbs:
        """Make them."""
