"""The table from RPC to role covers exactly what the protos define."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.support.secured import DEBUG_METHODS, METHODS
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import RULES, Role
from weightsync_server.auth.roles import Reserved
from weightsync_server.usecases.methods import use_cases

#: Methods that change nothing, whatever their names: written down here a second time on purpose.
READING = {"GetPush", "ListVersions", "GetVersion", "WatchVersions", "PullWeights", "VerifyVersion"}
READING |= {
    "GetEngineLayout",
    "ReadStaged",
    "GetStatus",
    "ListApplies",
    "GetFleetStatus",
    "GetTrainStatus",
    "Check",
    "Watch",
    "ServerReflectionInfo",
}


LOOKING = {"ListVersions", "GetVersion", "WatchVersions"}
ASKING = LOOKING | {"GetStatus", "ListApplies", "GetFleetStatus", "GetTrainStatus"}
ASKING |= {"Check", "Watch", "ServerReflectionInfo"}
APPLYING = ASKING | {"ApplyVersion", "Rollback", "VerifyVersion"}
PUSHING = {"AcquireEpoch", "BeginPush", "PushWeights", "CommitPush", "AbortPush", "GetPush"}
PUSHING |= {"GetEngineLayout", "ReportLogprobs"}
TRAINING = {"Attach", "WriteInPlace", "PullWeights", "Train", "Checkpoint", "CancelTrain"}
#: What each role may call and no more, written down a second time as well.
MAY_CALL = {
    Role.PUSH: ASKING | PUSHING,
    Role.APPLY: APPLYING,
    Role.READ: READING - {"ReadStaged"},
    Role.FOLLOW: LOOKING | {"PullWeights"},
    Role.MEMBER: {"Join", "ReadStaged"},
    Role.FLEET: APPLYING | {"AbortFleetApply"},
    Role.TRAIN: ASKING | PUSHING - {"AcquireEpoch"} | TRAINING,
    Role.ADMIN: {method.name for method in METHODS.values()},
}


def test_every_method_has_a_rule_and_every_rule_a_method() -> None:
    assert sorted(RULES) == sorted([*METHODS, *DEBUG_METHODS])


@pytest.mark.parametrize("path", METHODS)
def test_what_changes_state_is_marked_and_never_a_reader_s(path: str) -> None:
    rule = RULES[path]
    assert rule.changes is (METHODS[path].name not in READING)
    assert rule.changes is False or Role.READ not in rule.roles
    assert rule.allows(frozenset({Role.ADMIN}))
    assert not rule.allows(frozenset())


@pytest.mark.parametrize("role", Role)
def test_each_role_may_call_what_is_its_own(role: Role) -> None:
    allowed = {path for path in METHODS if RULES[path].allows(frozenset({role}))}
    assert {METHODS[path].name for path in allowed} == MAY_CALL[role]


def test_two_roles_add_up() -> None:
    both = frozenset({Role.FOLLOW, Role.PUSH})
    allowed = {METHODS[path].name for path in METHODS if RULES[path].allows(both)}
    assert allowed == MAY_CALL[Role.FOLLOW] | MAY_CALL[Role.PUSH]


@pytest.mark.parametrize(
    ("value", "sent", "allowed"),
    [
        (None, 0, {Role.APPLY, Role.FLEET, Role.ADMIN}),
        (None, 1, {Role.FLEET, Role.ADMIN}),
        (2, 0, {Role.APPLY, Role.FLEET, Role.ADMIN}),
        (2, 1, {Role.APPLY, Role.FLEET, Role.ADMIN}),
        (2, 2, {Role.FLEET, Role.ADMIN}),
    ],
)
def test_a_reserved_field_takes_its_role(value: int | None, sent: int, allowed: set[Role]) -> None:
    reserved = Reserved("version", Role.FLEET, value)
    request = pb.ApplyVersionRequest(version=sent)
    roles = (Role.APPLY, Role.FLEET, Role.ADMIN)
    assert {role for role in roles if reserved.allows(request, frozenset({role}))} == allowed


@pytest.mark.parametrize("name", ["ApplyVersion", "Rollback"])
def test_the_fleet_is_for_its_role(name: str) -> None:
    (scope,) = [
        one for one in RULES[f"/weightsync.v1.WeightSync/{name}"].reserved if one.field == "scope"
    ]
    request = pb.RollbackRequest(scope=pb.SCOPE_FLEET)
    assert not scope.allows(request, frozenset({Role.APPLY}))
    assert scope.allows(request, frozenset({Role.FLEET}))
    assert scope.allows(pb.RollbackRequest(scope=pb.SCOPE_HOST), frozenset({Role.APPLY}))


@pytest.mark.parametrize("path", RULES)
def test_reserved_fields_exist(path: str) -> None:
    fields = {**METHODS, **DEBUG_METHODS}[path].input_type.fields_by_name
    for reserved in RULES[path].reserved:
        values = getattr(fields[reserved.field].enum_type, "values_by_number", {})
        assert reserved.value is None or reserved.value in values


def test_methods_that_change_state_answer_once() -> None:
    # The audit line takes the version from the answer; a node that joins is no matter of one, and
    # a transaction, as a job makes them, has a line in the log when it is over.
    every = {**METHODS, **DEBUG_METHODS}
    changing = [every[path] for path, rule in RULES.items() if rule.changes]
    streaming = [method.name for method in changing if method.server_streaming]
    assert sorted(streaming) == ["Join", "Train", "WriteInPlace"]


def test_failpoints_are_for_admins() -> None:
    for path in DEBUG_METHODS:
        assert RULES[path].roles == {Role.ADMIN}


def test_every_method_of_ours_is_served() -> None:
    calls = use_cases(cast("Any", None))
    for method in pb.DESCRIPTOR.services_by_name["WeightSync"].methods:
        assert f"/{method.containing_service.full_name}/{method.name}" in calls
