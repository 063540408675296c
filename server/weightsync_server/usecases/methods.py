"""Which use case serves which method of the server's own services."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from weightsync.v1 import attach_pb2
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth.caller import UseCase
from weightsync_server.usecases import (
    attach_calls,
    logprob_calls,
    pull_calls,
    push_calls,
    serving_calls,
    version_calls,
)
from weightsync_server.usecases.core import ServerCore

_OURS = pb.DESCRIPTOR.services_by_name["WeightSync"].full_name
_ATTACH = attach_pb2.DESCRIPTOR.services_by_name["AttachService"].full_name
BEGIN_PUSH, ABORT_PUSH = f"/{_OURS}/BeginPush", f"/{_OURS}/AbortPush"
APPLY_VERSION, GET_STATUS = f"/{_OURS}/ApplyVersion", f"/{_OURS}/GetStatus"
GET_ENGINE_LAYOUT, LIST_APPLIES = f"/{_OURS}/GetEngineLayout", f"/{_OURS}/ListApplies"
LIST_VERSIONS, GET_FLEET_STATUS = f"/{_OURS}/ListVersions", f"/{_OURS}/GetFleetStatus"

_USE_CASES: Mapping[str, Callable[[ServerCore, Any, Any], Any]] = {
    f"/{_OURS}/AcquireEpoch": push_calls.acquire_epoch,
    BEGIN_PUSH: push_calls.begin_push,
    f"/{_OURS}/PushWeights": push_calls.push_weights,
    f"/{_OURS}/CommitPush": push_calls.commit_push,
    ABORT_PUSH: push_calls.abort_push,
    f"/{_OURS}/GetPush": push_calls.get_push,
    APPLY_VERSION: serving_calls.apply_version,
    f"/{_OURS}/Rollback": serving_calls.rollback,
    f"/{_OURS}/VerifyVersion": serving_calls.verify_version,
    f"/{_OURS}/ReportLogprobs": logprob_calls.report_logprobs,
    LIST_APPLIES: serving_calls.list_applies,
    GET_STATUS: serving_calls.get_status,
    GET_FLEET_STATUS: serving_calls.get_fleet_status,
    f"/{_OURS}/AbortFleetApply": serving_calls.abort_fleet_apply,
    LIST_VERSIONS: version_calls.list_versions,
    f"/{_OURS}/GetVersion": version_calls.get_version,
    GET_ENGINE_LAYOUT: version_calls.get_engine_layout,
    f"/{_OURS}/WatchVersions": version_calls.watch_versions,
    f"/{_OURS}/PinVersion": version_calls.pin_version,
    f"/{_OURS}/DeleteVersion": version_calls.delete_version,
    f"/{_OURS}/PullWeights": pull_calls.pull_weights,
    f"/{_ATTACH}/Attach": attach_calls.attach,
    f"/{_ATTACH}/WriteInPlace": attach_calls.write_in_place,
}


def use_cases(core: ServerCore) -> dict[str, UseCase]:
    """Return what serves each method, by its exact path."""
    return {path: partial(call, core) for path, call in _USE_CASES.items()}
