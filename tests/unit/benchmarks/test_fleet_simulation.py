"""The simulation of fleets: what it conserves, its order of events, and known arithmetic."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fleet.constants import CONSTANTS, rows
from benchmarks.fleet.figures import constants_table, keys, percentile, summed_up, table
from benchmarks.fleet.queues import Link, RequestRate
from benchmarks.fleet.scenarios import PAYLOADS, Payload, Scenario, StoreKind, scenarios
from benchmarks.fleet.simulation import Seconds, seconds_of, simulate

_DELTA, _FULL = PAYLOADS[:2]
_PAGE = Path(__file__).parents[3] / "docs/explain/fleet-scale.md"
#: The network alone: no work, no latency, and a store whose clients wait for hardly any time.
_WIRE = replace(
    CONSTANTS,
    stream_bytes_per_s=math.inf,
    memcpy_bytes_per_s=math.inf,
    s3_first_byte_s=0,
    own_store_first_byte_s=0,
    origin_first_byte_s=0,
    origin_bytes_per_s=CONSTANTS.nic_bytes_per_s,
    jitter_full_s=0,
    backoff_s=0.05,
    backoff_most_s=0.2,
    put_s=1e-6,
    watch_first_s=0,
    watch_step_s=0,
    delta_shard_bytes=1e12,
)


@pytest.mark.parametrize("store", StoreKind)
@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: payload.name)
def test_every_host_receives_every_byte_once(payload: Payload, store: StoreKind) -> None:
    run = simulate(Scenario(10, payload, store), seed=1)
    for host in run.barrier.hosts:
        assert host.received_bytes == pytest.approx(payload.read_bytes)
    assert run.sent_bytes == pytest.approx(10 * payload.read_bytes)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scenario", scenarios([10]), ids=lambda scenario: scenario.name)
def test_no_host_is_live_before_it_has_staged_and_its_decision_is_made(
    scenario: Scenario, seed: int
) -> None:
    run = simulate(scenario, seed)
    for applied in (run.barrier, run.rolling):
        decided = {
            number: decision.at
            for decision in applied.decisions
            if decision.commit
            for number in decision.members
        }
        for host in applied.hosts:
            if math.isfinite(host.live_at):
                assert host.staged_at < host.paused_at < host.live_at
                assert decided[host.number] < host.live_at < host.dies_at
    if scenario.go_on:
        assert math.isfinite(run.barrier.live_s)
        assert math.isfinite(run.rolling.live_s)


def test_a_barrier_has_one_decision_and_all_have_paused_before_it() -> None:
    applied = simulate(Scenario(10, _DELTA), seed=2).barrier
    (decision,) = applied.decisions
    assert decision.members == set(range(10))
    assert all(host.paused_at < decision.at < host.live_at for host in applied.hosts)


@pytest.mark.parametrize("most", [1, 3])
def test_waves_follow_each_other_and_are_no_larger_than_allowed(most: int) -> None:
    applied = simulate(Scenario(10, _DELTA, max_unavailable=most), seed=2).rolling
    sizes = Counter(number for one in applied.decisions for number in one.members)
    assert sizes == Counter(range(10))
    assert max(len(one.members) for one in applied.decisions) == most
    times = sorted((host.paused_at, host.live_at) for host in applied.hosts)
    for index, (paused_at, _) in enumerate(times):
        assert sum(live_at > paused_at for _, live_at in times[:index]) < most


def test_a_dead_host_is_waited_for_until_its_lease_runs_out() -> None:
    run = simulate(Scenario(10, _DELTA, deaths=1, death_window_s=0.5), seed=3)
    (dead,) = (host for host in run.barrier.hosts if math.isfinite(host.dies_at))
    assert math.isinf(dead.live_at)
    lasts = CONSTANTS.lease_s * (1 - 1 / CONSTANTS.lease_renewals)
    assert dead.dies_at + lasts <= dead.lapses_at <= dead.dies_at + CONSTANTS.lease_s
    assert dead.lapses_at < run.barrier.live_s < dead.lapses_at + 1


def test_where_no_host_may_be_missing_the_decision_is_abort() -> None:
    scenario = Scenario(10, _DELTA, deaths=1, death_window_s=0.5, go_on=False)
    run = simulate(scenario, seed=3)
    (decision,) = run.barrier.decisions
    assert not decision.commit
    assert all(math.isinf(host.live_at) for host in run.barrier.hosts)
    assert not run.rolling.decisions[-1].commit
    assert all(math.isinf(host.live_at) for host in run.rolling.hosts)


def test_a_seed_is_one_result_and_another_is_another() -> None:
    scenario = Scenario(10, _DELTA)
    assert seconds_of(scenario, 7) == seconds_of(scenario, 7)
    assert seconds_of(scenario, 7) != seconds_of(scenario, 8)


# The seconds of the network alone, worked out by hand: bytes over the narrowest link; for S3 the
# GETs of 64 MiB at 5,500 a second.
@pytest.mark.parametrize(
    ("payload", "store", "seconds"),
    [
        (0, StoreKind.S3, (0.0081, 0.0081, 0.0081, 0.3)),
        (0, StoreKind.OWN, (0.0081, 0.0405, 0.405, 4.05)),
        (0, StoreKind.ORIGIN, (0.0081, 0.081, 0.81, 8.1)),
        (1, StoreKind.S3, (1.2, 1.2, 4.1, 41)),
        (1, StoreKind.OWN, (1.2, 6, 60, 600)),
        (1, StoreKind.ORIGIN, (1.2, 12, 120, 1200)),
        (2, StoreKind.S3, (0.076, 0.076, 0.26, 2.6)),
        (2, StoreKind.OWN, (0.076, 0.38, 3.8, 38)),
        (3, StoreKind.OWN, (11.2, 56, 560, 5600)),
        (3, StoreKind.ORIGIN, (11.2, 112, 1120, 11200)),
    ],
)
def test_the_network_alone_takes_what_arithmetic_says(
    payload: int, store: StoreKind, seconds: tuple[float, ...]
) -> None:
    for hosts, expected in zip((1, 10, 100, 1000), seconds, strict=True):
        scenario = Scenario(hosts, PAYLOADS[payload], store, constants=_WIRE)
        # Clients that were refused come back a moment after the store could have served them.
        late = 0.2 if store is StoreKind.S3 and hosts > 1 else 0
        found = simulate(scenario, seed=0).staged_s
        assert 0.9 * expected <= found <= 1.05 * expected + late


def test_a_link_serves_in_order_and_stands_still_between() -> None:
    link = Link(10)
    assert link.send(0, 20) == 2
    assert link.send(1, 10) == 3
    assert link.send(5, 10) == 6


def test_requests_beyond_burst_and_rate_are_refused() -> None:
    rate = RequestRate(10, 5)
    assert rate.admit(0, 5)
    assert not rate.admit(0, 1)
    assert not rate.admit(0.05, 1)
    assert rate.admit(0.1, 1)
    # More than a burst is admitted from a full one, and paid for afterwards.
    assert rate.admit(10, 15)
    assert not rate.admit(11, 1)
    assert rate.admit(11.2, 1)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([3.0], 0.99) == 3


def test_every_constant_has_a_unit_and_a_source() -> None:
    assert len(rows()) == len(dataclasses.fields(CONSTANTS))
    assert all(row.unit and row.source for row in rows())


# The page.


def test_the_page_has_these_constants() -> None:
    assert constants_table() in _PAGE.read_text(), "run `python -m benchmarks.fleet --constants`"


def test_the_page_has_what_a_fresh_run_says_of_ten_hosts() -> None:
    lines = [one for one in scenarios([10]) if one.payload.delta and not one.note]
    runs = [[seconds_of(one, seed) for seed in range(100)] for one in lines]
    fresh = table([summed_up(line, run) for line, run in zip(lines, runs, strict=True)])
    page = _PAGE.read_text()
    for line in fresh.splitlines():
        assert line in page, "run `python -m benchmarks.fleet --simulate 10,100,1000 --table`"


def test_the_command_prints_one_line_and_names_the_bound_where_it_applies() -> None:
    command = (sys.executable, "-m", "benchmarks.fleet", "--json", "--seeds", "2")
    output = subprocess.run(
        [*command, "--simulate", "3,10"], capture_output=True, text=True, check=True
    ).stdout
    line = json.loads(output)
    assert line["benchmark"] == "fleet"
    assert line["parameters"] == {"hosts": [3, 10], "seeds": 2}
    assert 0 < line["sim_delta15_3_barrier_p99_s"] <= line["sim_delta140_3_barrier_p99_s"]
    assert line["sim_delta15_10_a_host_dies_abort_barrier_p99_s"] is None
    assert "met" not in line


@pytest.mark.parametrize(("seconds", "met"), [(2.9, True), (3.1, False)])
def test_the_bound_is_of_a_thousand_hosts(seconds: float, met: bool) -> None:
    runs = [Seconds(1, seconds, 9, 0.1, 0)]
    found = keys([summed_up(Scenario(1000, _DELTA), runs)])
    assert found["sim_delta15_1000_barrier_p99_wanted_s"] == 3
    assert found["met"] is met
    assert "met" not in keys([summed_up(Scenario(1000, _FULL), runs)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [([], "--simulate 10,100,1000"), (["--simulate", "0"], "invalid"), (["--seeds", "0"], "name")],
)
def test_the_command_refuses_what_it_cannot_do(flags: list[str], message: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.fleet", *flags],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert message in ended.stderr
