"""The one table from RPC to role: what is not in it, nobody may call."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PUSH_WEIGHTS", "RULES", "Reserved", "Role", "Rule"]


class Role(enum.StrEnum):
    """What a caller may do.

    Attributes:
        PUSH: Become the writer, push versions and drop pushes.
        APPLY: Make a version live, go back, prove what is live.
        READ: Look at everything, the bytes of versions included.
        FOLLOW: Learn of versions and fetch their bytes, as a server on another host does.
        MEMBER: What servers of one engine or fleet ask of each other to prepare and decide.
        FLEET: What APPLY may, for the whole fleet too.
        TRAIN: Have the live parameters of an engine on this host, write them, push and read
            versions, and give the trainer of this server jobs.
        ADMIN: All of that; also delete, pin, and accept a rejected version again.
    """

    PUSH = "push"
    APPLY = "apply"
    READ = "read"
    FOLLOW = "follow"
    MEMBER = "member"
    FLEET = "fleet"
    TRAIN = "train"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Reserved:
    """A field of a request that takes more than the right to call.

    Attributes:
        field: Its name.
        role: What it takes; the admin role always suffices.
        value: The number that takes it, as of an enum; None: every one but the default.
    """

    field: str
    role: Role
    value: int | None = None

    def allows(self, request: Any, roles: frozenset[Role]) -> bool:
        """Return whether a caller with these roles may send that request."""
        found = getattr(request, self.field)
        asked = bool(found) if self.value is None else found == self.value
        return not asked or bool({self.role, Role.ADMIN} & roles)


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call one RPC.

    Attributes:
        roles: Any one of them suffices; the admin role always does.
        changes: Whether it changes state: then every call leaves an audit line.
        reserved: Fields of the request that take another role besides.
    """

    roles: frozenset[Role]
    changes: bool = False
    reserved: tuple[Reserved, ...] = ()

    def allows(self, roles: frozenset[Role]) -> bool:
        """Return whether a caller with these roles may call."""
        return Role.ADMIN in roles or bool(self.roles & roles)


_PUSH, _READ, _ADMIN = (frozenset({role}) for role in (Role.PUSH, Role.READ, Role.ADMIN))
_TRAIN = frozenset({Role.TRAIN})
#: Who writes live parameters pushes what they are.
_PUSHING = _PUSH | _TRAIN
_APPLY = frozenset({Role.APPLY, Role.FLEET})
#: What trainers and controllers need to know as well: names, numbers and states, no bytes.
_ANY = _PUSH | _APPLY | _READ | _TRAIN
#: Servers of other hosts: what they do not need, they may not ask.
_FOLLOW, _MEMBER = (frozenset({role}) for role in (Role.FOLLOW, Role.MEMBER))
_CLEARING = Reserved("clear_rejected", Role.ADMIN)
#: `SCOPE_FLEET`.
_FLEET = Reserved("scope", Role.FLEET, 2)
_OURS = "/weightsync.v1.WeightSync"
_TRAINER = "/weightsync.v1.TrainService"
#: The method that ingest processes serve.
PUSH_WEIGHTS = f"{_OURS}/PushWeights"

#: Exact method path to rule. A test compares it with the descriptors of every service we serve.
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        f"{_OURS}/AcquireEpoch": Rule(_PUSH, changes=True),
        f"{_OURS}/BeginPush": Rule(_PUSHING, changes=True),
        PUSH_WEIGHTS: Rule(_PUSHING, changes=True),
        f"{_OURS}/CommitPush": Rule(_PUSHING, changes=True),
        f"{_OURS}/AbortPush": Rule(_PUSHING, changes=True),
        f"{_OURS}/GetPush": Rule(_PUSHING | _READ),
        f"{_OURS}/ApplyVersion": Rule(_APPLY, changes=True, reserved=(_CLEARING, _FLEET)),
        f"{_OURS}/Rollback": Rule(_APPLY, changes=True, reserved=(_FLEET,)),
        f"{_OURS}/VerifyVersion": Rule(_APPLY | _READ),
        f"{_OURS}/ListVersions": Rule(_ANY | _FOLLOW),
        f"{_OURS}/GetVersion": Rule(_ANY | _FOLLOW),
        f"{_OURS}/GetEngineLayout": Rule(_PUSHING | _READ),
        f"{_OURS}/WatchVersions": Rule(_ANY | _FOLLOW),
        f"{_OURS}/GetStatus": Rule(_ANY),
        f"{_OURS}/GetFleetStatus": Rule(_ANY),
        f"{_OURS}/AbortFleetApply": Rule(frozenset({Role.FLEET}), changes=True),
        # Who trains has what is live.
        f"{_OURS}/PullWeights": Rule(_READ | _FOLLOW | _TRAIN),
        f"{_OURS}/PinVersion": Rule(_ADMIN, changes=True),
        f"{_OURS}/DeleteVersion": Rule(_ADMIN, changes=True),
        "/weightsync.v1.AttachService/Attach": Rule(_TRAIN, changes=True),
        "/weightsync.v1.AttachService/WriteInPlace": Rule(_TRAIN, changes=True),
        f"{_TRAINER}/Train": Rule(_TRAIN, changes=True),
        f"{_TRAINER}/Checkpoint": Rule(_TRAIN, changes=True),
        f"{_TRAINER}/GetTrainStatus": Rule(_ANY),
        f"{_TRAINER}/CancelTrain": Rule(_TRAIN, changes=True),
        "/weightsync.node.v1.NodeService/Join": Rule(_MEMBER, changes=True),
        "/weightsync.node.v1.NodeService/ReadStaged": Rule(_MEMBER),
        # There only where the process was started with failpoints, and for this host only.
        "/weightsync.debug.v1.DebugService/SetFailpoints": Rule(_ADMIN),
        "/weightsync.debug.v1.DebugService/GetFailpoints": Rule(_ADMIN),
        "/grpc.health.v1.Health/Check": Rule(_ANY),
        "/grpc.health.v1.Health/Watch": Rule(_ANY),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Rule(_ANY),
    }
)
