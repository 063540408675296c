"""The one table from RPC to role: what is not in it, nobody may call."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PUSH_WEIGHTS", "RULES", "Role", "Rule"]


class Role(enum.StrEnum):
    """What a caller may do.

    Attributes:
        PUSH: Become the writer, push versions and drop pushes.
        APPLY: Make a version live, go back, prove what is live.
        READ: Look at everything, the bytes of versions included.
        ADMIN: All of that; also delete, pin, and accept a rejected version again.
    """

    PUSH = "push"
    APPLY = "apply"
    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call one RPC.

    Attributes:
        roles: Any one of them suffices; the admin role always does.
        changes: Whether it changes state: then every call leaves an audit line.
        admin_fields: Fields of the request that only the admin role may set.
    """

    roles: frozenset[Role]
    changes: bool = False
    admin_fields: tuple[str, ...] = ()

    def allows(self, roles: frozenset[Role]) -> bool:
        """Return whether a caller with these roles may call."""
        return Role.ADMIN in roles or bool(self.roles & roles)


_PUSH, _APPLY, _ADMIN = (frozenset({role}) for role in (Role.PUSH, Role.APPLY, Role.ADMIN))
_READ = frozenset({Role.READ})
#: What trainers and controllers need to know as well: names, numbers and states, no bytes.
_ANY = frozenset(Role)
_OURS = "/weightsync.v1.WeightSync"
#: The method that ingest processes serve.
PUSH_WEIGHTS = f"{_OURS}/PushWeights"

#: Exact method path to rule. A test compares it with the descriptors of every service we serve.
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        f"{_OURS}/AcquireEpoch": Rule(_PUSH, changes=True),
        f"{_OURS}/BeginPush": Rule(_PUSH, changes=True),
        PUSH_WEIGHTS: Rule(_PUSH, changes=True),
        f"{_OURS}/CommitPush": Rule(_PUSH, changes=True),
        f"{_OURS}/AbortPush": Rule(_PUSH, changes=True),
        f"{_OURS}/GetPush": Rule(_PUSH | _READ),
        f"{_OURS}/ApplyVersion": Rule(_APPLY, changes=True, admin_fields=("clear_rejected",)),
        f"{_OURS}/Rollback": Rule(_APPLY, changes=True),
        f"{_OURS}/VerifyVersion": Rule(_APPLY | _READ),
        f"{_OURS}/ListVersions": Rule(_ANY),
        f"{_OURS}/GetVersion": Rule(_ANY),
        f"{_OURS}/WatchVersions": Rule(_ANY),
        f"{_OURS}/GetStatus": Rule(_ANY),
        f"{_OURS}/PullWeights": Rule(_READ),
        f"{_OURS}/PinVersion": Rule(_ADMIN, changes=True),
        f"{_OURS}/DeleteVersion": Rule(_ADMIN, changes=True),
        # There only where the process was started with failpoints, and for this host only.
        "/weightsync.debug.v1.DebugService/SetFailpoints": Rule(_ADMIN),
        "/weightsync.debug.v1.DebugService/GetFailpoints": Rule(_ADMIN),
        "/grpc.health.v1.Health/Check": Rule(_ANY),
        "/grpc.health.v1.Health/Watch": Rule(_ANY),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Rule(_ANY),
    }
)
