"""The table from RPC to role covers exactly what the protos define."""

from __future__ import annotations

import pytest

from tests.support.secured import DEBUG_METHODS, METHODS
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import RULES, Role
from weightsync_server.rpc import WeightSyncServicer

#: Methods that change nothing, whatever their names: written down here a second time on purpose.
READING = {"GetPush", "ListVersions", "GetVersion", "WatchVersions", "PullWeights", "VerifyVersion"}
READING |= {"GetStatus", "Check", "Watch", "ServerReflectionInfo"}


def test_every_method_has_a_rule_and_every_rule_a_method() -> None:
    assert sorted(RULES) == sorted([*METHODS, *DEBUG_METHODS])


@pytest.mark.parametrize("path", METHODS)
def test_what_changes_state_is_marked_and_never_a_reader_s(path: str) -> None:
    rule = RULES[path]
    assert rule.changes is (METHODS[path].name not in READING)
    assert rule.changes is False or Role.READ not in rule.roles
    assert rule.allows(frozenset({Role.ADMIN}))
    assert not rule.allows(frozenset())


@pytest.mark.parametrize("path", RULES)
def test_fields_for_admins_exist(path: str) -> None:
    fields = {**METHODS, **DEBUG_METHODS}[path].input_type.fields_by_name
    assert set(RULES[path].admin_fields) <= set(fields)


def test_methods_that_change_state_answer_once() -> None:
    # The witness and the audit line count on it.
    for path, rule in RULES.items():
        assert not (rule.changes and {**METHODS, **DEBUG_METHODS}[path].server_streaming)


def test_failpoints_are_for_admins() -> None:
    for path in DEBUG_METHODS:
        assert RULES[path].roles == {Role.ADMIN}


def test_every_method_of_ours_is_served() -> None:
    for method in pb.DESCRIPTOR.services_by_name["WeightSync"].methods:
        assert method.name in vars(WeightSyncServicer)
