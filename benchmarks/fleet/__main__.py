"""How long a fleet takes from a commit until its last host is live on the version.

With --simulate a simulation of discrete events, no clock and no network: for each payload, store
and number of hosts

sim_<payload>_<hosts>[_<store>][_<what differs>]_staged_p99_s
                       seconds from the commit until the last host has staged
..._barrier_p50_s, ..._barrier_p99_s
                       until the last host is live by one decision; null: never
..._pause_p99_s        the longest pause of an engine in it
..._rolling_p99_s      until the last host is live, wave by wave
sim_delta15_1000_barrier_p99_wanted_s, met
                       the bound of a 1 % delta of 15 GB on 1,000 hosts, and whether it is kept

Payloads: delta15 and delta140 (1 % of the values of 15 and 140 GB), full15 and full140. Stores: s3
where none is named, own, origin. docs/scale.md has the tables (--table), every constant with its
source (--constants), what is left out and where it stops being true.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor

from benchmarks import report
from benchmarks.fleet.figures import Line, constants_table, keys, summed_up, table
from benchmarks.fleet.scenarios import scenarios
from benchmarks.fleet.simulation import simulate_many

__all__ = ["main", "simulated"]

#: Whole versions move little from seed to seed, and have the most events.
_FULL_SEEDS = 5


def main() -> None:
    """Read the command line, simulate and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--simulate", type=_sizes, metavar="HOSTS", help="such as 10,100,1000")
    parser.add_argument("--seeds", type=int, default=100, help="of each line (default 100)")
    parser.add_argument("--table", action="store_true", help="print the table of docs/scale.md")
    parser.add_argument("--constants", action="store_true", help="print the constants' table")
    options = parser.parse_args()
    if options.constants:
        print(constants_table(), end="")
        return
    if not options.simulate:
        parser.error("name the sizes of the fleets: --simulate 10,100,1000")
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}; it must be 1 or more")
    lines = simulated(options.simulate, options.seeds)
    if options.table:
        print(table(lines), end="")
        return
    parameters = {"hosts": options.simulate, "seeds": options.seeds}
    report.emit("fleet", parameters, {}, keys(lines), as_json=options.json)


def simulated(hosts: list[int], seeds: int) -> list[Line]:
    """Return every line for these sizes; whole versions get a fifth of the seeds.

    Args:
        hosts: Sizes of fleets.
        seeds: Of each line.
    """
    found = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for scenario in scenarios(hosts):
            count = seeds if scenario.payload.delta else max(1, seeds // _FULL_SEEDS)
            found.append(summed_up(scenario, simulate_many(scenario, count, pool)))
            print(f"{scenario.name} is done", file=sys.stderr)
    return found


def _sizes(text: str) -> list[int]:
    sizes = [int(one) for one in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


if __name__ == "__main__":
    main()
