"""To take how far a trainer's log probabilities are from those of answers."""

from __future__ import annotations

import math

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import Caller
from weightsync_server.catalog.table import VersionTable
from weightsync_server.ops.logprob_gaps import LogprobSums
from weightsync_server.usecases.core import ServerCore

_MOST_GAPS = 64
#: More tokens are none that a trainer has.
_MOST_TOKENS = 1 << 48


async def report_logprobs(
    core: ServerCore, caller: Caller, request: pb.ReportLogprobsRequest
) -> pb.ReportLogprobsResponse:
    """Count all that a request tells, or, where any of it is wrong, nothing."""
    core.check_model(request.model)
    table = core.versions.model.table
    trained = request.trained_version or table.newest
    _check_version("trained_version", trained, table)
    if not 1 <= len(request.gaps) <= _MOST_GAPS:
        raise _invalid(f"give the gaps of 1 to {_MOST_GAPS} versions, not {len(request.gaps)}")
    for gap in request.gaps:
        _check_gap(gap, table)
    for gap in request.gaps:
        sums = LogprobSums(gap.tokens, gap.sum_abs, gap.sum_k3)
        core.versions.logprobs.add(gap.version, max(0, trained - gap.version), sums)
    return pb.ReportLogprobsResponse()


def _check_gap(gap: pb.LogprobGap, table: VersionTable) -> None:
    _check_version("the version of a gap", gap.version, table)
    if not 1 <= gap.tokens <= _MOST_TOKENS:
        raise _invalid(
            f"leave out version {gap.version}, or count its tokens: {gap.tokens} is given"
        )
    for name in ("sum_abs", "sum_k3", "max_abs"):
        value = getattr(gap, name)
        if not 0 <= value < math.inf:
            raise _invalid(
                f"leave out tokens without a finite log probability: {name} of version "
                f"{gap.version} is {value}, and must be finite and at least 0"
            )


def _check_version(what: str, version: int, table: VersionTable) -> None:
    highest = max((record.version for record in table.list()), default=0)
    if not 1 <= version <= max(highest, table.highest):
        raise _invalid(
            f"give the number of a version as answers name it: {what} is {version}, and model "
            f"{table.name} has had none above {max(highest, table.highest)}"
        )


def _invalid(message: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, message)
