"""The settings of a server that is a member of a fleet, and what they must be together."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, model_validator

from weightsync.errors import WeightSyncError
from weightsync_server.fleet.fleet_limits import FleetLimits
from weightsync_server.fleet.fleet_records import check_member
from weightsync_server.register.register_url import check_register_url

__all__ = ["FleetSettings"]


class FleetSettings(BaseModel):
    """Settings of a member; a server without `fleet` is in none."""

    fleet: str = Field(
        "",
        description="Name of the fleet that this server is a member of: what its engines serve is "
        "decided there, by `weightsync fleet apply`. With `--engine none` it is no member, and "
        "only keeps what members need. Empty: of none.",
    )
    fleet_register: str = Field(
        "",
        description="Where the fleet decides: etcd://HOST:PORT,.../PREFIX or etcds://, s3://, "
        "gs:// or az:// with a prefix of its own, or file:///path for servers of one host.",
    )
    fleet_ca: Path | None = Field(
        None, description="PEM: who signs the certificates of an etcds:// register."
    )
    fleet_cert: Path | None = Field(None, description="Certificate that etcd is shown, PEM.")
    fleet_key: Path | None = Field(None, description="Its key, PEM, no password.")
    fleet_member: str = Field(
        default_factory=socket.gethostname,
        description="Name of this server in its fleet, one of a kind. Default: the host's name.",
    )
    undecided_limit_s: float = Field(
        30,
        gt=0,
        description="Seconds for which a member of a barrier stands still without learning the "
        "decision; then it is fenced until it has.",
    )
    member_ttl_s: int = Field(
        10,
        ge=1,
        description="Seconds after which a member that is not heard of has left the fleet. Etcd "
        "makes them 2 or more.",
    )
    max_skew: int = Field(
        1, ge=0, description="Rolling commits by which a host that serves may be behind its fleet."
    )
    max_age_s: float = Field(
        0,
        ge=0,
        description="Seconds without the register after which a host serves nothing, also where "
        "this server is dead or frozen; 0: it goes on for as long as the register is away.",
    )
    max_unavailable: int = Field(
        1,
        ge=1,
        description="Members that a rolling apply of the fleet may take away at once, where the "
        "call does not say.",
    )

    @model_validator(mode="after")
    def _check_fleet(self) -> Self:
        if bool(self.fleet) != bool(self.fleet_register):
            raise ValueError(
                "fleet and fleet_register go together: the name, and where the fleet decides"
            )
        if not self.fleet:
            if self.fleet_ca or self.fleet_cert or self.fleet_key:
                raise ValueError("fleet_ca, fleet_cert and fleet_key are for --fleet; name one")
            return self
        try:
            check_member(self.fleet, "fleet")
            check_member(self.fleet_member)
            check_register_url(self.fleet_register, self.fleet)
            _ = self.fleet_limits
        except WeightSyncError as error:
            raise ValueError(error.message) from error
        return self

    @property
    def fleet_limits(self) -> FleetLimits:
        """How long members wait, and how far they may be apart."""
        poll_s = min(FleetLimits.poll_s, self.max_age_s / 3) if self.max_age_s else None
        return FleetLimits(
            undecided_s=self.undecided_limit_s,
            max_skew=self.max_skew,
            max_age_s=self.max_age_s,
            member_ttl_s=self.member_ttl_s,
            grace_s=self.member_ttl_s / 2,
            poll_s=poll_s or FleetLimits.poll_s,
        )
