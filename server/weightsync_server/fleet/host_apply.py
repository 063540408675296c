"""What a member of a fleet asks of its host: the engines behind one server, as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weightsync.engine import PauseSpec
    from weightsync_server.fleet.fleet_plan import FleetVersion

__all__ = ["HostApply"]


class HostApply(Protocol):
    """One host. Calls come one at a time, but for `live`, and may be repeated at any time.

    A host that loses this process while it is paused or fenced serves nothing until it is asked
    again: a pause must never end by itself, also not by its lease. By itself a host serves nothing
    but the version that `commit` or `resume` has let it serve last, so that an engine which comes
    back with another one waits.
    """

    async def prepare(self, target: FleetVersion, pause: PauseSpec | None = None) -> None:
        """Have a version staged and proved on every rank, while the live one is served.

        May be cancelled.

        Args:
            target: The version.
            pause: How to change over to it; None: as where nobody chooses.

        Raises:
            WeightSyncError: It cannot be: absent, rejected, refused by a rank, or an engine cannot
                pause so.
        """

    async def pause(self) -> None:
        """Stand still: from its return nothing is generated until `commit` or `resume`.

        The host may put what it has prepared in place and prove it before it returns, so that
        `commit` has only to let it be served; `resume` then puts the version before back first.

        Raises:
            WeightSyncError: It serves as before.
        """

    async def commit(self, target: FleetVersion) -> None:
        """Make a prepared version live, prove it and serve it; pauses by itself where needed.

        Raises:
            WeightSyncError: Nothing is served until the next `commit` or `resume`; `live` says
                what is in place.
        """

    async def resume(self) -> None:
        """Serve what is live, after a pause, a fence or a failed commit; drop what was prepared.

        Raises:
            WeightSyncError: Nothing is served.
        """

    async def fence(self, reason: str) -> None:
        """Serve nothing (503) until `commit` or `resume`; from any state.

        Args:
            reason: One sentence, for people.

        Raises:
            WeightSyncError: It may still serve; call again.
        """

    async def reject(self, digest: str, reason: str = "") -> None:
        """Never take a content again, unless an admin clears that.

        Args:
            digest: Of the content.
            reason: Why, for people; "": nobody said.
        """

    async def accept(self, digest: str) -> None:
        """Take a content again that may have been rejected.

        Raises:
            WeightSyncError: It is rejected still; call again.
        """

    def live(self) -> FleetVersion | None:
        """Return the version that every rank is proved to hold, served or not; None: there is none.

        Between `pause` and the return of `commit` it is the one before.

        The number is 0 where the content has none that the fleet knows.
        """
