"""What the client returns is in the messages, under the names of the fields."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from weightsync.v1 import train_pb2
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import train_calls, types
from weightsync_client.rpc.convert import from_message, to_report

_PAIRS = (
    (types.Version, pb.VersionInfo),
    (types.VersionChange, pb.WatchVersionsResponse),
    (types.Verification, pb.VerifyVersionResponse),
    (types.ApplyReport, pb.ApplyReport),
    (types.EngineReport, pb.EngineReport),
    (types.ApplyRecord, pb.ApplyRecord),
    (types.Status, pb.GetStatusResponse),
    (types.ModelStatus, pb.ModelStatus),
    (types.EngineStatus, pb.EngineStatus),
    (types.RankResult, pb.RankResult),
    (types.LoaderStatus, pb.LoaderStatus),
    (types.FleetStatus, pb.GetFleetStatusResponse),
    (types.FleetReport, pb.FleetReport),
    (train_calls.TrainStatus, train_pb2.GetTrainStatusResponse),
    (train_calls.CheckpointResult, train_pb2.CheckpointResponse),
)


@pytest.mark.parametrize(("kind", "message"), _PAIRS)
def test_each_field_is_in_the_message(kind: Any, message: Any) -> None:
    made = from_message(kind, message())
    assert is_dataclass(made)
    for field in fields(made):
        found = getattr(made, field.name)
        assert not hasattr(found, "DESCRIPTOR"), field.name
        assert not hasattr(found, "append"), field.name


def _filled(message: Any) -> Any:
    """Give a message one of each message that it may hold, to the bottom."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        held = getattr(message, field.name)
        if field.message_type.file.package == message.DESCRIPTOR.file.package:
            _filled(held.add() if field.is_repeated else held)
        if not field.is_repeated:
            held.SetInParent()
    return message


@pytest.mark.parametrize(("kind", "message"), _PAIRS)
def test_so_is_each_of_what_they_hold(kind: Any, message: Any) -> None:
    assert is_dataclass(from_message(kind, _filled(message())))


def test_values_of_all_kinds() -> None:
    message = pb.ApplyReport(outcome=pb.APPLY_OUTCOME_APPLIED, version=4)
    message.MergeFromString(b"\x60\x63")
    message.phases.paused_total.FromMilliseconds(1500)
    message.plan.bytes = 7
    message.ranks.add(rank="0/0/1").loader.load.FromMilliseconds(250)
    for order in ("", "zigzag"):
        fleet = from_message(types.FleetReport, pb.FleetReport(order=order))
        assert fleet.order is types.FleetOrder.UNSPECIFIED
    report = to_report(message, [pb.EngineReport(engine="a", absent="it is away")])
    assert (report.outcome, report.version) == (types.ApplyOutcome.APPLIED, 4)
    # One that only a newer server knows.
    assert report.strategy is types.ApplyStrategy.UNSPECIFIED
    assert report.phases.paused_total_s == 1.5
    assert report.plan is not None
    assert report.plan.write_bytes == 7
    loader = report.ranks[0].loader
    assert loader is not None
    assert (loader.load_s, loader.state) == (0.25, types.LoaderState.UNSPECIFIED)
    assert report.engines == (types.EngineReport("a", None, "it is away"),)


def test_what_is_absent_is_none() -> None:
    version = from_message(types.Version, pb.VersionInfo(metadata={"step": "3"}))
    assert (version.commit_time, version.metadata) == (None, {"step": "3"})
    message = pb.VersionInfo()
    message.commit_time.FromSeconds(60)
    there = from_message(types.Version, message)
    assert there.commit_time == datetime(1970, 1, 1, 0, 1, tzinfo=UTC)
    status = from_message(types.FleetStatus, pb.GetFleetStatusResponse())
    assert (status.newest, status.read_age_s) == (None, None)
