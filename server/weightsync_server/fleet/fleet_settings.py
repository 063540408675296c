"""The settings of a server that is a member of a fleet, and the limits that follow from them."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from weightsync.errors import WeightSyncError
from weightsync_server.coordination import check_register_url
from weightsync_server.coordination.etcd_channels import EtcdTls
from weightsync_server.fleet.fleet_records import check_member
from weightsync_server.ops.settings_group import setting


@dataclass(frozen=True)
class FleetLimits:
    """Durations in seconds, each counted by the process that waits, by a clock that only rises.

    Attributes:
        undecided_s: How long a member of a barrier stands still without a decision until it fences
            itself.
        max_skew: By how many rolling commits a host that serves may be behind.
        max_age_s: How old what a host has read in the register may be while it serves; 0: any age,
            so that hosts go on when the register is lost.
        member_ttl_s: After which a member that is not renewed is gone.
        grace_s: How long the coordinator of a running apply is gone until members abort it.
        prepare_s: The longest time of an apply until everybody of a wave is ready.
        settle_s: How long a coordinator waits for members to become live after COMMIT.
        retry_s: Pause before a member prepares or commits again what failed.
        poll_s: How often the register is read where no hint comes.
    """

    undecided_s: float = 30.0
    max_skew: int = 1
    max_age_s: float = 0.0
    member_ttl_s: int = 10
    grace_s: float = 5.0
    prepare_s: float = 600.0
    settle_s: float = 120.0
    retry_s: float = 5.0
    poll_s: float = 10.0


@dataclass(frozen=True)
class FleetSettings:
    """Settings of a member; a server without `fleet` is in none."""

    fleet: str = setting(
        "",
        "Name of the fleet that this server is a member of: the fleet decides what its engines "
        "serve, by `weightsync fleet apply`. With `--engine none` it is no member, and only keeps "
        "what members need. Empty: no fleet.",
    )
    register: str = setting(
        "",
        "Where the fleet decides: etcd://HOST:PORT,.../PREFIX or etcds://; s3://, gs:// or az:// "
        "with a prefix of its own; or file:///path for servers on one host.",
        name="fleet_register",
    )
    ca: Path | None = setting(
        None, "CA of the certificates of an etcds:// register, PEM.", name="fleet_ca"
    )
    certificate: Path | None = setting(None, "Client certificate for etcd, PEM.", name="fleet_cert")
    key: Path | None = setting(None, "Key of fleet_cert, PEM, no password.", name="fleet_key")
    member: str = setting(
        None,
        "Name of this server in its fleet, unique there. Default: the host's name.",
        name="fleet_member",
        default_factory=socket.gethostname,
    )
    undecided_s: float = setting(
        30,
        "Seconds for which a member of a barrier stays paused without learning the decision; then "
        "it is fenced until it learns it.",
        name="undecided_limit_s",
        gt=0,
    )
    member_ttl_s: int = setting(
        10,
        "Seconds without a sign of life after which a member has left the fleet. Etcd: at least 2.",
        ge=1,
    )
    max_skew: int = setting(
        1, "Rolling commits by which a serving host may be behind its fleet.", ge=0
    )
    max_age_s: float = setting(
        0,
        "Seconds without the register after which a host stops serving, even if this server is "
        "dead or frozen; 0: it serves for as long as the register is away.",
        ge=0,
    )
    max_unavailable: int = setting(
        1,
        "Members that a rolling apply of the fleet may make unavailable at once; a call may "
        "override it.",
        ge=1,
    )

    def check(self) -> None:
        """Refuse with ValueError what does not go together, or cannot be opened."""
        if bool(self.fleet) != bool(self.register):
            raise ValueError(
                "fleet and fleet_register go together: the name, and where the fleet decides"
            )
        if not self.fleet:
            if self.tls is not None:
                raise ValueError("fleet_ca, fleet_cert and fleet_key are for --fleet; name one")
            return
        try:
            check_member(self.fleet, "fleet")
            check_member(self.member)
            check_register_url(self.register, self.fleet)
        except WeightSyncError as error:
            raise ValueError(error.message) from error

    @property
    def tls(self) -> EtcdTls | None:
        files = self.ca, self.certificate, self.key
        return EtcdTls(*files) if any(files) else None

    @property
    def limits(self) -> FleetLimits:
        poll_s = min(FleetLimits.poll_s, self.max_age_s / 3) if self.max_age_s else None
        return FleetLimits(
            undecided_s=self.undecided_s,
            max_skew=self.max_skew,
            max_age_s=self.max_age_s,
            member_ttl_s=self.member_ttl_s,
            grace_s=self.member_ttl_s / 2,
            poll_s=poll_s or FleetLimits.poll_s,
        )
