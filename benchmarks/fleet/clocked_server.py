"""A weightsync-server that writes down when its member did what; run as one, with its flags.

Nothing else differs. A line of the file that `WEIGHTSYNC_BENCH_CLOCK` names is JSON: what, of which
version, and when, by the machine's monotonic clock, which all its processes share.

ready    the host stands still in a barrier, and the member is about to send the record of it
read     the member has read that the newest apply is decided, and is about to act on it
live     the host's engines have resumed on the version
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from weightsync_server import cli
from weightsync_server.decide import FleetVersion
from weightsync_server.fleet.fleet_member import FleetMember
from weightsync_server.fleet.member_steps import HostMode, MemberState
from weightsync_server.fleet_host import fleet_service
from weightsync_server.fleet_host.fleet_host import LocalHost

__all__ = ["CLOCK", "main"]

#: Environment variable: path of the file.
CLOCK = "WEIGHTSYNC_BENCH_CLOCK"


def _note(what: str, version: int) -> None:
    line = json.dumps([what, version, time.monotonic()])
    with Path(os.environ[CLOCK]).open("a") as file:
        file.write(line + "\n")


class ClockedMember(FleetMember):
    """A member that notes what it is, each time that it looks what comes next."""

    def __init__(self, *arguments: Any) -> None:
        self._noted = {("", 0)}
        super().__init__(*arguments)

    @property
    def state(self) -> MemberState:
        """What it is now."""
        state, history = super().state, self.view.history
        newest = history.newest if history is not None else None
        if newest is not None:
            version = newest.plan.target.number
            if newest.outcome is not None:
                self._once("read", version)
            elif state.mode is HostMode.PAUSED:
                self._once("ready", version)
        return state

    def _once(self, what: str, version: int) -> None:
        if (what, version) not in self._noted:
            self._noted.add((what, version))
            _note(what, version)


class ClockedHost(LocalHost):
    """A host that notes when it serves what was decided."""

    async def commit(self, target: FleetVersion) -> None:
        """As `HostParticipant` says."""
        await super().commit(target)
        _note("live", target.number)


def main() -> None:
    """Be the server."""
    for name, clocked in {"FleetMember": ClockedMember, "LocalHost": ClockedHost}.items():
        setattr(fleet_service, name, clocked)
    cli.main()


if __name__ == "__main__":
    main()
