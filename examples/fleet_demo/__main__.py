"""Watch a fleet take each new version together, while one of its hosts dies and comes back.

Starts etcd, a server that speaks S3, an origin and three followers on this machine, each a real
weightsync-server, the followers with an engine of two ranks that generates nothing. A trainer
pushes to the origin, followers fetch from the store, and `weightsync fleet apply` makes each
version live on all of them, rolling and by a barrier in turns. Ends by itself, within three
minutes as it stands: with status 0 if every follower is proved to hold what was decided last, the
one that was killed came back to what was decided while it was away, and no process failed; else
with 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from examples.demo.processes import Processes, ProcessesError, exit_on_signals, short_folder
from examples.fleet_demo.course import Course, Plan, Shown
from examples.fleet_demo.hosts import LEASE_S, Follower, Origin
from examples.fleet_demo.services import check_programs, start_etcd, start_store
from examples.fleet_demo.table import View
from examples.fleet_demo.trainer import Trainer
from examples.fleet_demo.watcher import Watcher
from weightsync_client import ClientError

_FOLLOWERS = ("host1", "host2", "host3")
#: All that takes time but the pauses between pushes, on two busy cores.
_WORK_S = 140.0
_LEAST_VERSIONS = 3


def main() -> int:
    """Run the demo and return its exit status."""
    plan = _read_arguments()
    exit_on_signals()
    console = Console()
    _say(console, _promise(plan))
    try:
        etcd = check_programs()
        with tempfile.TemporaryDirectory(prefix="ws-fleet-", dir=short_folder()) as folder:
            shown = _run(plan, etcd, Path(folder), console)
    except KeyboardInterrupt:
        _say(console, "stopped; nothing is left")
        return 130
    except (ProcessesError, ClientError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    _say(console, _summary(shown))
    return 0


def _read_arguments() -> Plan:
    parser = argparse.ArgumentParser(
        prog="python -m examples.fleet_demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--versions", type=int, default=8, help="to push, 3 or more (default 8)")
    parser.add_argument(
        "--every", type=float, default=4, help="seconds from push to push (default 4)"
    )
    given = parser.parse_args()
    if given.versions < _LEAST_VERSIONS:
        parser.error(f"--versions is {given.versions}; it must be {_LEAST_VERSIONS} or more")
    if not 0 <= given.every <= 60:
        parser.error(f"--every is {given.every:g}; it must be from 0 to 60")
    return Plan(given.versions, given.every)


def _promise(plan: Plan) -> str:
    return (
        f"Starts etcd, an S3 server, an origin and {', '.join(_FOLLOWERS)}.\n"
        f"Pushes {plan.versions} versions, one every {plan.every_s:g} s, and applies each to the "
        "whole fleet, rolling and by a barrier in turns.\n"
        f"Kills {_FOLLOWERS[-1]} after {plan.killed_after} of them and starts it again after "
        f"{plan.back_after}.\n"
        f"Takes about {_expected_s(plan):.0f} s; Ctrl-C ends it. Nothing is left of it."
    )


def _summary(shown: Shown) -> str:
    orders = dict.fromkeys(shown.orders)
    counts = " and ".join(f"{shown.orders.count(order)} {order}" for order in orders)
    return (
        f"Shown: {len(shown.orders)} fleet-wide applies, {counts}.\n"
        f"{shown.killed} was killed on version {shown.killed_on} and came back to version "
        f"{shown.back_on}, decided while it was away, {shown.back_s:.1f} s after its start.\n"
        f"{', '.join(_FOLLOWERS)} are proved to hold version {shown.decided}, decided last."
    )


def _expected_s(plan: Plan) -> float:
    # Start and end, a lease that runs out, and each version.
    return 25 + LEASE_S + plan.versions * max(plan.every_s, 1.5)


def _run(plan: Plan, etcd: str, folder: Path, console: Console) -> Shown:
    deadline = time.monotonic() + _WORK_S + plan.versions * plan.every_s
    trainer, model = Trainer(), folder / "model.safetensors"
    trainer.save(model)
    with Processes(folder) as processes:
        register = start_etcd(processes, etcd, folder, deadline)
        store = start_store(processes, deadline)
        origin = Origin("origin", folder / "origin", processes, store)
        followers = [
            Follower(name, folder / name, processes, store, register, model) for name in _FOLLOWERS
        ]
        with Watcher([origin, *followers]) as watcher, View(console, watcher) as view:
            course = Course(plan, processes, origin, followers, watcher, view, deadline)
            return course.run(trainer)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.file.flush()


if __name__ == "__main__":
    sys.exit(main())
