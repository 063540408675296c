"""How a push is opened: what the caller said, checked, and what each try of it adds."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.rpc.client_run import client_run
from weightsync_client.rpc.validate import metadata, text, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync_client.options import PushOptions
    from weightsync_client.push.partial import NamedBase
    from weightsync_client.push_reasons import Fallback
    from weightsync_client.source.source import Source

__all__ = ["RequestTemplate"]


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """What every try of one push says of it.

    Attributes:
        model: Name of the model.
        version: Wanted; 0: the next one.
        epoch: The writer's; 0: the newest.
        key: Idempotency key of the caller; empty: each try gets one of its own.
        metadata: Text kept with the version.
    """

    model: str
    version: int
    epoch: int
    key: str
    metadata: Mapping[str, str]

    @classmethod
    def from_options(cls, model: str, options: PushOptions) -> Self:
        """Return what the caller's options say.

        Raises:
            ClientError: REQUEST_INVALID; one of them cannot be.
        """
        return cls(
            model,
            whole_number("version", options.get("version", 0)),
            whole_number("epoch", options.get("epoch", 0)),
            text("idempotency_key", options.get("idempotency_key") or ""),
            metadata(options.get("metadata", {})),
        )

    @property
    def run_id(self) -> str:
        """The training run; empty: not named."""
        return self.metadata.get("run_id", "")

    def request(
        self,
        source: Source,
        reason: Fallback | str,
        *,
        same_host: bool,
        base: NamedBase | None = None,
    ) -> pb.BeginPushRequest:
        """Return the request that opens a try.

        Args:
            source: What is sent.
            reason: Why that is all in place of a delta; empty: it needs none.
            same_host: Whether the server's memory is asked for.
            base: The version whose other tensors several processes keep; None: they send all.
        """
        digest = base.content_digest if base else ""
        layout, delta, writer = source.layout, source.delta, source.writer
        return pb.BeginPushRequest(
            model=self.model,
            version=self.version,
            epoch=self.epoch,
            kind=pb.PUSH_KIND_DELTA if delta else pb.PUSH_KIND_FULL,
            base_content_digest=delta.base_content_digest if delta else digest,
            idempotency_key=writer.key if writer else self.key or uuid.uuid4().hex,
            layout_digest=layout.digest if layout else "",
            total_bytes=layout.size if layout else 0,
            shard_count=len(layout.shards) if layout else 0,
            metadata=self.metadata,
            stream=None if same_host else pb.StreamSource(),
            same_host=pb.SameHostSource() if same_host else None,
            fallback_reason=reason,
            writers=writer.count if writer else 0,
            writer=writer.number if writer else 0,
            partial=base is not None,
            base_version=base.version if base else 0,
            client_run=client_run(),
        )
