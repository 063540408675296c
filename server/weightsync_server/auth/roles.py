"""The one table from RPC to role, and the sockets that stand for a role."""

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from weightsync.wire.grpc_channels import is_private
from weightsync_server.ops.settings_group import setting


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
    """A field of a request that takes `role` besides the right to call; admin always suffices.

    `value` is the number that takes it; None: every one but the default.
    """

    field: str
    role: Role
    value: int | None = None

    def allows(self, request: Any, roles: frozenset[Role]) -> bool:
        found = getattr(request, self.field)
        asked = bool(found) if self.value is None else found == self.value
        return not asked or bool({self.role, Role.ADMIN} & roles)


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call one RPC: any of the `roles`, or admin. If it `changes` state, it is audited."""

    roles: frozenset[Role]
    changes: bool = False
    reserved: tuple[Reserved, ...] = ()

    def allows(self, roles: frozenset[Role]) -> bool:
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
        # It changes what operators are shown.
        f"{_OURS}/ReportLogprobs": Rule(_PUSHING, changes=True),
        f"{_OURS}/ListVersions": Rule(_ANY | _FOLLOW),
        f"{_OURS}/GetVersion": Rule(_ANY | _FOLLOW),
        f"{_OURS}/GetEngineLayout": Rule(_PUSHING | _READ),
        f"{_OURS}/WatchVersions": Rule(_ANY | _FOLLOW),
        f"{_OURS}/ListApplies": Rule(_ANY),
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


_MAX_PORT = 65535
#: What ends with a port, or with the name of a service.
_WITH_PORT = re.compile(r".*:[\w-]+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address to listen on: HOST:PORT or unix:PATH, as gRPC takes it.

    `role` is that of every process that can open a unix socket; None: it gives none. A `private`
    unix socket is for its owner alone, and not for the group.
    """

    address: str
    role: Role | None = None
    private: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read HOST:PORT, unix:PATH or unix:PATH?role=ROLE; ValueError has the remedy."""
        address, mark, query = text.partition("?")
        if not mark:
            if not address.startswith("unix:") and not _has_port(address):
                raise ValueError(
                    f"{text!r} has no port; write HOST:PORT, such as 127.0.0.1:50551 (a host of "
                    "IPv6 in brackets), or unix:PATH"
                )
            return cls(address)
        key, _, value = query.partition("=")
        if not address.startswith("unix:") or key != "role" or value not in list(Role):
            raise ValueError(
                f"{text!r} is not an address; only unix:PATH?role=... takes one of "
                f"{', '.join(Role)}"
            )
        return cls(address, Role(value))

    def __str__(self) -> str:
        return f"{self.address}?role={self.role}" if self.role else self.address

    @property
    def is_socket(self) -> bool:
        return self.address.startswith("unix:")

    @property
    def takes_pushes(self) -> bool:
        """Whether a caller of PushWeights can have authority here."""
        return self.role is None or RULES[PUSH_WEIGHTS].allows(frozenset({self.role}))

    def ingest_endpoint(self, number: int) -> Self:
        """Return the endpoint of an ingest process: PORT + number, or unix:PATH.number."""
        if self.is_socket:
            return replace(self, address=f"{self.address}.{number}")
        host, _, port = self.address.rpartition(":")
        if not port.isdecimal() or int(port) + number > _MAX_PORT:
            raise ValueError(
                f"{self.address} plus {number} is not a valid port; choose a lower one"
            )
        # With port 0 each takes any that is free.
        return replace(self, address=f"{host}:{int(port) and int(port) + number}")


def _check_listen(addresses: list[str]) -> list[str]:
    sockets = set()
    for address in addresses:
        socket = Endpoint.parse(address).address
        if socket in sockets and socket.startswith("unix:"):
            raise ValueError(f"{socket} is named twice; give each role its own path")
        sockets.add(socket)
    if not addresses:
        raise ValueError("name at least one address to listen on")
    return addresses


@dataclass(frozen=True)
class ListenerSettings:
    """Where the server listens, who may call there, and how many at once."""

    listen: list[str] = setting(
        ["127.0.0.1:50551"],
        "gRPC addresses: HOST:PORT, unix:PATH, or unix:PATH?role=ROLE, a socket that gives ROLE "
        "(push, train, apply, read, follow, member, fleet or admin) to all who may open it. Other "
        "hosts can reach an address only with TLS and an authority file.",
        check=_check_listen,
    )
    authority: Path | None = setting(
        None,
        "TOML or JSON file with the roles of callers; read again on change. Unset: any caller on "
        "this host may do everything.",
    )
    tls_cert: Path | None = setting(
        None, "Certificate chain, PEM: TLS on every TCP address. Read again on change."
    )
    tls_key: Path | None = setting(None, "Key of tls_cert, PEM, no password.")
    tls_client_ca: Path | None = setting(
        None, "CA of clients, PEM: only clients with a certificate from it may connect."
    )
    max_calls: int = setting(1024, "Concurrent calls of every kind.", ge=16)
    max_connections: int = setting(512, "Concurrent connections to each address.", ge=1)

    def check(self, others: Sequence[Endpoint]) -> None:
        """Refuse with ValueError, at `others` too, what a stranger could reach and use."""
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_client_ca and not self.tls_cert):
            raise ValueError("tls_cert and tls_key go together, and tls_client_ca needs both")
        own = self.endpoints
        for endpoint in [*own, *others]:
            if is_private(endpoint.address):
                continue
            if not self.tls_cert:
                private = "127.0.0.1:PORT or unix:PATH" if endpoint in own else "127.0.0.1:PORT"
                raise ValueError(
                    f"{endpoint.address} can be reached from other hosts; give --tls-cert and "
                    f"--tls-key, or listen on {private}"
                )
            if not self.authority:
                raise ValueError(
                    f"{endpoint.address} can be reached from other hosts without authentication; "
                    "give --authority FILE with tokens or certificate names"
                )

    @property
    def endpoints(self) -> list[Endpoint]:
        return [Endpoint.parse(address) for address in self.listen]

    def of_ingest(self, place: int) -> list[Endpoint]:
        """Return where an ingest process listens, by its number from 0; ValueError: nowhere."""
        return [one.ingest_endpoint(place + 1) for one in self.endpoints if one.takes_pushes]


def _has_port(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return _WITH_PORT.fullmatch(address) is not None
    # The last part of a bare address of IPv6 is no port.
    return False
