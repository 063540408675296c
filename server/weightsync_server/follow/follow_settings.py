"""The settings of a server that follows another one."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, model_validator

from weightsync_server.follow.follow_url import check_cache

__all__ = ["FollowSettings"]


class FollowSettings(BaseModel):
    """Settings of a follower; a server without `follow` is none."""

    follow: str = Field(
        "",
        description="Origin whose versions are fetched, kept and staged here, where no pushes are "
        "taken then: grpc://HOST:PORT or grpcs://HOST:PORT of a server, or its store as s3://, "
        "gs://, az:// or file:///path.",
    )
    follow_interval_s: float = Field(
        1, gt=0, description="How often a store that is followed is looked for versions, seconds."
    )
    follow_cache: str = Field(
        "",
        description="http://HOST:PORT/PATH or https:// of a cache before a store that is followed: "
        "shards are asked for there first, by their key below the store's URL, and each piece is "
        "compared with its BLAKE3 from the store. Nothing else is asked of it.",
    )
    follow_ca: Path | None = Field(None, description="PEM: who signs the origin's certificate.")
    follow_cert: Path | None = Field(None, description="Certificate that the origin is shown, PEM.")
    follow_key: Path | None = Field(None, description="Its key, PEM, no password.")
    follow_token_file: Path | None = Field(None, description="The origin's token, mode 0600.")

    @model_validator(mode="after")
    def _check_cache(self) -> Self:
        check_cache(self.follow_cache, self.follow)
        return self
