"""The head that `--node-of` names, checked before anything is started."""

from __future__ import annotations

from weightsync.wire.addresses import is_private
from weightsync_server.follow.follow_url import grpc_target, is_encrypted

__all__ = ["check_node"]


def check_node(head: str, rank: int, follow: str, *, ca: bool) -> None:
    """Refuse a node that no head can be found for.

    Args:
        head: URL of the server beside the engine's first node; empty: this is no node's server.
        rank: Which node this is; 0: not given.
        follow: URL of an origin; a node has none.
        ca: Authorities of the head's certificate are given.

    Raises:
        ValueError: Naming the remedy.
    """
    if not head:
        if rank:
            raise ValueError("node_rank is for --node-of; name the engine's head with it")
        return
    if not rank:
        raise ValueError("node_of needs --node-rank, as vLLM has it on this node: 1 or more")
    if follow:
        raise ValueError("a node gets all from its head; leave out --follow, or --node-of")
    target = grpc_target(head)
    host, _, port = target.rpartition(":")
    if not (target.startswith("unix:") or (host and port.isdecimal())):
        raise ValueError(f"node_of cannot be {head!r}; use grpc://HOST:PORT or grpcs://HOST:PORT")
    if not is_private(target) and not is_encrypted(head, ca=ca):
        raise ValueError(
            f"node_of names {head}, and others could read and change weights on the way; use "
            "grpcs://HOST:PORT, or give --follow-ca"
        )
