"""A server as of the release after this one, which has learnt something new.

    python -m tests.support.newer_release FLAGS

Where a call chooses how members pause, its plan is of a format that this release does not know; all
else it says as this release does, as `fleet_records` asks of every release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.fleet_tasks import in_format
from weightsync_server import cli
from weightsync_server.fleet import coordinator, fleet_records

if TYPE_CHECKING:
    from weightsync_server.decide import DecisionPlan

__all__ = ["main"]


def main() -> None:
    """Run the server."""
    encode = fleet_records.encode_plan
    newest = fleet_records.FORMAT + 1

    def encode_plan(plan: DecisionPlan, parts: int) -> bytes:
        body = encode(plan, parts)
        return body if plan.pause is None else in_format(newest, body)

    vars(fleet_records)["FORMAT"] = newest
    vars(coordinator)["encode_plan"] = encode_plan
    cli.main()


if __name__ == "__main__":
    main()
