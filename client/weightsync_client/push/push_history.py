"""What a client remembers from one push to the next, and kernels compiled ahead of time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync.errors import Reason
from weightsync.wire.grpc_channels import is_private
from weightsync_client.errors import invalid, refuse
from weightsync_client.push_reasons import TransferPath
from weightsync_client.snapshot.snapshot import SnapshotStore, read_snapshot
from weightsync_client.source.casting import Casting
from weightsync_client.source.shards import LayoutCache

if TYPE_CHECKING:
    import torch

    from weightsync_client.options import PushOptions
    from weightsync_client.rpc.retry import RetryingCalls
    from weightsync_client.rpc.tensor_pages import EngineLayout
    from weightsync_client.source.source import Source
    from weightsync_client.transport.protocol import Sent
    from weightsync_client.types import PushResult, Version

#: Bytes per second below which zstd saves more time than it takes: both sides together, on one
#: core, between 110 and 270 MB/s at 1 to 30 % of changes.
_SLOW = 150e6
#: A shorter transfer says more of its beginning than of the link.
_LEAST_BYTES = 8 << 20


class LinkSpeed:
    """Measures pushes in full; those of deltas mostly wait for their encoder.

    A server on this host is never slow.
    """

    def __init__(self, address: str) -> None:
        self._near = is_private(address)
        self._bytes_per_s: float | None = None

    def note(self, sent: int, seconds: float) -> None:
        """Take a transfer into account; the latest one counts."""
        if sent >= _LEAST_BYTES and seconds > 0:
            self._bytes_per_s = sent / seconds

    @property
    def slow(self) -> bool:
        """Whether bytes cost more than the time to pack them."""
        measured = self._bytes_per_s
        return not self._near and measured is not None and measured < _SLOW


logger = logging.getLogger(__name__)


class Warmup:
    """Compiles kernels once, in a thread of its own: that saves the first delta half a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, devices: AbstractSet[torch.device]) -> None:
        """Begin, unless it was begun or there is no device; returns at once."""
        with self._lock:
            if devices and self._thread is None:
                # No daemon: a compiler that is torn down with the interpreter may crash it.
                self._thread = threading.Thread(
                    target=_compile_kernels, args=[devices], name="weightsync-warm-up"
                )
                self._thread.start()


def _compile_kernels(devices: AbstractSet[torch.device]) -> None:
    from weightsync.gpu.device_kernels import Kernels, NvrtcError

    for device in devices:
        # Who compares says why there are none. Nothing is loaded here: the trainer may be capturing
        # a graph, which no other thread must disturb.
        with contextlib.suppress(NvrtcError):
            Kernels.compile_for(device)


class PushHistory:
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
        """Take a push in full into account, whose transports took `seconds`."""
        self.server_copies = sent.by_server and not result.durable
        if sent.way is TransferPath.STREAM:
            self.link_speed.note(result.sent_bytes, seconds)

    def casting(self, options: PushOptions, calls: RetryingCalls | None, model: str) -> Casting:
        """Return how the tensors of a push are sent.

        `calls` ask the server what the engines hold now. With None, the last answer is used, and
        nothing is refused for it.
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
        if casting.cast.total and not self.cast_logged:
            self.cast_logged = True
            logger.info(
                "weightsync: pushes are cast to the dtypes of the engine (%d tensors, such as %s); "
                "use dtype='exact' to refuse such pushes, or dtype='keep' to send tensors "
                "unchanged",
                *casting.cast,
            )

    def hold(self, source: Source, versions: Callable[[], list[Version]]) -> Version:
        """Take a copy of the version whose content `source` has, for the next delta.

        `versions` lists the server's versions. Raises VERSION_UNKNOWN if none has that content.
        """
        if source.layout is None:
            raise invalid("an iterable cannot be held; use a state dict")
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
