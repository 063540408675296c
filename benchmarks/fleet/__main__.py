"""How long a fleet takes from a commit until its last host is live on the version.

With --hosts N it is measured, on this machine: a trainer and N hosts, each a network namespace
whose link carries --link-mb each way, and a weightsync-server with an engine in memory on each
host. One round comes before those that count, every push changes all values and sends all.

one_by_one_s            the trainer pushes to each host in turn, over its link, until the last push
                        has returned, committed and staged
push_to_staged_everywhere_s_<way>
                        it pushes once, to an origin on its own host, until the last follower has
                        the version committed and staged
over_one_by_one_<way>   that over one_by_one_s of the same round; wanted at most 0.5 through file
                        and s3
origin_sent_<way>       what has left the trainer's host by its link meanwhile, headers included,
                        over the version's bytes; of file, what the origin has written; wanted at
                        most 1.05 with a store
cores_<way>             cores that all processes of the benchmark kept busy meanwhile, of this
                        machine's: near all of them, the figure is the machine's and not the link's
link_s                  as many bytes over one link by a bare TCP connection
disk_s                  as many bytes written to this machine's disk by one process, and flushed;
                        origin and followers keep versions there, all on one disk
late_joiner_s           through s3: from the start of a server that has nothing until its engine
                        serves the version that the fleet has decided; start_s of one that has no
                        fleet and no origin, until its engine serves its own checkpoint
decision_p99_s          of a barrier, three etcd, a model of 64 KiB: from the moment at which the
                        last member is about to send its record that it is ready, until the last
                        member has read the decision; wanted at most 0.1
create_to_read_p99_s    in the same etcd without any load: from a create until another connection,
                        which watches, has read the key; a decision takes two of these at least
skew_s, skew_p99_s      of the same barriers: from the first host whose engine has resumed on the
                        version to the last one
barrier_s               of the same, the whole call

Ways: file, a folder on this machine's disk, which no link limits; s3, a server on a host without
a limit, as a store of many machines is; grpc, from the origin to each follower, by TLS, as pushes
one by one are. Needs root, iproute2 and etcd.

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
where none is named, own, origin. docs/explain/fleet-scale.md has the tables (--table), each
constant with its source (--constants), what is left out and where it stops being true.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor

from benchmarks import report
from benchmarks.fleet.figures import Line, constants_table, keys, summed_up, table
from benchmarks.fleet.measured import Measure, measured
from benchmarks.fleet.scenarios import scenarios
from benchmarks.fleet.simulation import simulate_many

__all__ = ["main", "simulated"]

#: Whole versions move little from seed to seed, and have the most events.
_FULL_SEEDS = 5
#: Whose addresses fit into one small network.
_MOST_HOSTS = 200


def main() -> None:
    """Read the command line, measure or simulate, and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--hosts", type=int, help="measure a fleet of 1 to 200, such as 8")
    parser.add_argument("--mib", type=int, default=128, help="of the model (default 128)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default 3)")
    parser.add_argument("--link-mb", type=float, default=40, help="MB/s of a link (default 40)")
    parser.add_argument("--decisions", type=int, default=200, help="barriers (default 200)")
    parser.add_argument("--simulate", type=_sizes, metavar="HOSTS", help="such as 10,100,1000")
    parser.add_argument("--seeds", type=int, default=100, help="of each line (default 100)")
    parser.add_argument("--table", action="store_true", help="print the table of the page on scale")
    parser.add_argument("--constants", action="store_true", help="print the constants' table")
    options = parser.parse_args()
    if options.constants:
        print(constants_table(), end="")
        return
    if options.hosts is not None:
        if not 1 <= options.hosts <= _MOST_HOSTS:
            parser.error(f"--hosts is {options.hosts}; it must be 1 to {_MOST_HOSTS}")
        if min(options.mib, options.rounds, options.decisions) < 1 or options.link_mb <= 0:
            parser.error("--mib, --rounds and --decisions must be 1 or more, --link-mb above 0")
        _measure(options)
        return
    if not options.simulate:
        parser.error("name what to do: measure with --hosts 8, or --simulate 10,100,1000")
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}; it must be 1 or more")
    lines = simulated(options.simulate, options.seeds)
    if options.table:
        print(table(lines), end="")
        return
    parameters = {"hosts": options.simulate, "seeds": options.seeds}
    report.emit("fleet", parameters, {}, keys(lines), as_json=options.json)


def _measure(options: argparse.Namespace) -> None:
    # As an error does, a signal then ends servers and takes the namespaces away.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    link = round(options.link_mb * 1e6)
    measure = Measure(options.hosts, options.mib << 20, options.rounds, link, options.decisions)
    samples, facts = measured(measure)
    parameters = {
        **measure._asdict(),
        "origin_and_trainer": "one host",
        "store_link": "not limited",
        "file_system": "this machine's disk, not limited",
        "fetchers": 1,
        "etcd": 3,
    }
    report.emit("fleet", parameters, samples, facts, as_json=options.json)


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
