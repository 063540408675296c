"""What a client remembers from one push to the next."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync.errors import Reason
from weightsync_client.errors import refuse
from weightsync_client.push.warmup import Warmup
from weightsync_client.push_reasons import Way
from weightsync_client.snapshot.link_speed import LinkSpeed
from weightsync_client.snapshot.snapshot_store import SnapshotStore, read_snapshot
from weightsync_client.source.casting import Casting
from weightsync_client.source.layout_cache import LayoutCache

if TYPE_CHECKING:
    from weightsync_client.options import PushOptions
    from weightsync_client.rpc.engine_layout import EngineLayout
    from weightsync_client.rpc.retry import RetryingCalls
    from weightsync_client.source.source import Source
    from weightsync_client.transport.protocol import Sent
    from weightsync_client.types import PushResult, Version

__all__ = ["PushHistory"]

logger = logging.getLogger(__name__)


class PushHistory:
    """What a client remembers from push to push.

    Args:
        address: Of the server.
    """

    def __init__(self, address: str) -> None:
        self.layouts = LayoutCache()
        self.snapshot = SnapshotStore()
        #: The version that was committed last; 0: none was.
        self.committed = 0
        #: Its content digest.
        self.committed_digest = ""
        self.link_speed = LinkSpeed(address)
        self.kernels = Warmup()
        #: The last push in full was copied from GPUs by the server, which keeps it in memory only.
        self.server_copies = False
        #: It was tried whether the server does that.
        self.tried = False
        #: What the engines held when this client last asked, also where nobody knows it since.
        self.engine_layout: EngineLayout | None = None
        #: The log says that tensors are cast.
        self.cast_logged = False
        #: It had no memory for the changes of several processes, beside that for a version.
        self.server_lacks_room = False

    def observe(self, sent: Sent, seconds: float, result: PushResult) -> None:
        """Take a push in full into account.

        Args:
            sent: What its transports did.
            seconds: How long that took.
            result: What came of it.
        """
        self.server_copies = sent.by_server and not result.durable
        if sent.way is Way.STREAM:
            self.link_speed.note(result.sent_bytes, seconds)

    def casting(self, options: PushOptions, calls: RetryingCalls | None, model: str) -> Casting:
        """Return how the tensors of a push are sent.

        Args:
            options: Of the push.
            calls: Ask the server what the engines hold now; None: what they held when it was last
                asked has to do, and nothing is refused for that.
            model: Name of the model.

        Raises:
            ClientError: The server does not tell.
        """
        mode, finite = options.get("dtype", "auto"), bool(options.get("check_finite"))
        if mode == "keep" or (calls is None and mode != "auto"):
            return Casting(finite=finite)
        if calls is not None:
            # One that is away comes back as it was, as far as anybody knows. Nothing is told either
            # where several engines hold different tensors, which the answer cannot say: what was
            # known of them is kept then, too, and their server refuses what one of them does not
            # take.
            self.engine_layout = (
                calls.engine_layout(model, self.engine_layout) or self.engine_layout
            )
        return Casting(self.engine_layout, exact=mode == "exact", finite=finite)

    def tell_cast(self, casting: Casting) -> None:
        """Have the log tell, once, that tensors are cast."""
        if casting.cast.total and not self.cast_logged:
            self.cast_logged = True
            logger.info(
                "weightsync: pushes are cast to the dtypes of the engine (%d tensors, such as %s); "
                "use dtype='exact' to refuse such pushes, or dtype='keep' to send tensors "
                "unchanged",
                *casting.cast,
            )

    def hold(self, source: Source, versions: Callable[[], list[Version]]) -> Version:
        """Take a copy of what the server holds as a version, for the next delta.

        Args:
            source: Tensors with the content of that version.
            versions: Lists the versions of the server.

        Raises:
            ClientError: VERSION_UNKNOWN: no version has that content. MEMORY_EXHAUSTED.
        """
        if source.layout is None:
            raise refuse(Reason.REQUEST_INVALID, "an iterable cannot be held; use a state dict")
        with self.snapshot.turn(self.snapshot.line_up(), threading.Event()):
            source.ready()
            current = read_snapshot(source.layout, source.tensors)
            for version in versions():
                if version.content_digest == current.content_digest:
                    run_id = version.metadata.get("run_id", "")
                    self.snapshot.current = replace(current, version=version.version, run_id=run_id)
                    return version
        raise refuse(
            Reason.VERSION_UNKNOWN,
            f"no version of the server has this content ({current.content_digest}); name the one "
            "that was pushed or adopted, or push in full",
        )
