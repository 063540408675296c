"""The probes that come with the commit of a push: checked before anything is committed."""

from __future__ import annotations

import math

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.kept_probes import MAX_BYTES, pack
from weightsync_server.push.state import PushState
from weightsync_server.push.validation import refused

_MAX_PROBES, _MIN_TOKENS, _MAX_TOKENS = 64, 2, 512
#: A log probability that rounding has put above 0.
_NOISE = 1e-6


def check_probes(probes: pb.Probes) -> None:
    """Refuse probes that no gate could score; REQUEST_INVALID names the first that is wrong."""
    count = len(probes.probes)
    if not 1 <= count <= _MAX_PROBES:
        raise refused(f"send 1 to {_MAX_PROBES} probes: there are {count}; or leave `probes` out")
    if (size := probes.ByteSize()) > MAX_BYTES:
        raise refused(f"send fewer or shorter probes: they have {size} bytes, {MAX_BYTES} are most")
    for index, probe in enumerate(probes.probes):
        if why := _wrong(probe):
            raise refused(f"probe {index} {why}")


def _wrong(probe: pb.Probe) -> str:
    tokens, start = len(probe.tokens), probe.start or 1
    if not _MIN_TOKENS <= tokens <= _MAX_TOKENS:
        return f"must have {_MIN_TOKENS} to {_MAX_TOKENS} tokens: it has {tokens}"
    if start >= tokens:
        return f"must have a start of 1 to {tokens - 1}: it has {start}"
    given, wanted = len(probe.logprobs), tokens - start
    if given not in (0, wanted):
        return (
            f"must have no logprobs, or {wanted}, one for each token from {start} on: it has "
            f"{given}"
        )
    bad = next((one for one in probe.logprobs if not (math.isfinite(one) and one <= _NOISE)), None)
    return (
        f"must have logprobs that are finite and 0 or less: one is {bad}" if bad is not None else ""
    )


def take_probes(state: PushState, request: pb.CommitPushRequest) -> None:
    """Keep what a writer sends for the commit; a push stays as it was if that is refused."""
    if not request.HasField("probes"):
        return
    check_probes(request.probes)
    others = (given for writer, given in state.probes.items() if writer != request.writer)
    if any(given != request.probes for given in others):
        raise refused(
            f"leave the probes of writer {request.writer} out: another writer of this push has "
            "sent different ones"
        )
    kept = pb.Probes()
    kept.CopyFrom(request.probes)
    state.probes[request.writer] = kept


def packed(state: PushState) -> str:
    """Return what the commit record keeps of a push's probes; empty: nobody sent any."""
    return pack(next(iter(state.probes.values()))) if state.probes else ""
