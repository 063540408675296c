"""The settings of a server that follows another one, and the addresses of origin and head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from weightsync.wire.grpc_channels import is_private
from weightsync_server.ops.settings_group import setting
from weightsync_server.store import READERS
from weightsync_server.store.objects.object_keys import is_location

_GRPC = ("grpc://", "grpcs://")
_FORMS = (
    "grpc://HOST:PORT, grpcs://HOST:PORT, s3://bucket/prefix, gs://bucket/prefix, "
    "az://container/prefix or file:///absolute/path"
)


def grpc_target(url: str) -> str:
    """Return the address of a server that is followed; empty: it is a store that is."""
    return url.partition("://")[2].rstrip("/") if url.startswith(_GRPC) else ""


def is_encrypted(url: str, *, ca: bool) -> bool:
    """Tell whether a server is spoken to by TLS: its URL says so, or there is a CA for it."""
    unix = grpc_target(url).startswith("unix:")
    return not unix and (url.startswith("grpcs://") or ca)


def check_cache(cache: str, url: str) -> None:
    """Refuse with ValueError a cache that cannot be asked, or that stands before nothing.

    An empty `cache` means that there is none, an empty `url` that no origin is followed.
    """
    if not cache:
        return
    if not is_location(url):
        raise ValueError(
            "follow_cache stands before a store of objects; use it with --follow s3://, gs:// or "
            "az://"
        )
    parts = urlsplit(cache)
    plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise ValueError(
            "follow_cache must be http://HOST:PORT/PATH or https://, below which the objects of "
            "the store are, without user, password or query"
        )


def check_follow(url: str, store: str, *, ca: bool, others: bool) -> None:
    """Refuse with ValueError what cannot be followed, or cannot be kept.

    An empty `url` means that no origin is followed, an empty `store` that this server keeps
    versions in a folder of its own. `ca` says whether authorities of the origin's certificate are
    given, and `others` whether other files for it are: a certificate, its key, a token.
    """
    if not url:
        if ca or others:
            raise ValueError(
                "follow_ca, follow_cert, follow_key and follow_token_file are for --follow; "
                "name the origin with it"
            )
        return
    _check_form(url)
    target = grpc_target(url)
    if target and not is_private(target) and not is_encrypted(url, ca=ca):
        raise ValueError(
            f"follow names {url}, whose traffic other hosts could read and change; use "
            "grpcs://HOST:PORT, or give --follow-ca"
        )
    if (ca or others) and not target:
        raise ValueError(
            "follow_ca, follow_cert, follow_key and follow_token_file are for an origin at "
            "grpc:// or grpcs://; credentials of a store are read from the environment"
        )
    if store == "memory://" or is_location(store):
        raise ValueError(
            "name a folder with --store, or leave it out: a follower keeps what it fetches in a "
            f"folder, not in {store}"
        )
    if store and url.removeprefix("file://").rstrip("/") == store.removeprefix("file://").rstrip(
        "/"
    ):
        raise ValueError(f"{store} cannot follow itself; name another folder with --store")


def _check_form(url: str) -> None:
    if target := grpc_target(url):
        host, _, port = target.rpartition(":")
        if target.startswith("unix:") or (host and port.isdecimal() and "@" not in host):
            return
    elif url.partition("://")[0] in READERS:
        return
    else:
        parts = urlsplit(url)
        plain = not (parts.netloc or parts.query or parts.fragment)
        if parts.scheme in ("file", "") and plain and parts.path.startswith("/"):
            return
    raise ValueError(f"follow cannot be {url!r}; use {_FORMS}")


def check_node(head: str, rank: int, follow: str, *, ca: bool) -> None:
    """Refuse with ValueError a node that no head can be found for.

    `head` is the URL of the server beside the engine's first node; empty: this is no node's server.
    A `rank` of 0 was not given. `follow` is the URL of an origin; a node has none.
    """
    if not head:
        if rank:
            raise ValueError("node_rank is for --node-of; name the engine's head with it")
        return
    if not rank:
        raise ValueError("node_of needs --node-rank, as vLLM has it on this node: 1 or more")
    if follow:
        raise ValueError("leave out --follow or --node-of: a node gets everything from its head")
    target = grpc_target(head)
    host, _, port = target.rpartition(":")
    if not (target.startswith("unix:") or (host and port.isdecimal())):
        raise ValueError(f"node_of cannot be {head!r}; use grpc://HOST:PORT or grpcs://HOST:PORT")
    if not is_private(target) and not is_encrypted(head, ca=ca):
        raise ValueError(
            f"node_of names {head}, and other hosts could read and change weights in transit; use "
            "grpcs://HOST:PORT, or give --follow-ca"
        )


@dataclass(frozen=True)
class ReplicaSettings:
    """Settings of a server that follows another one at `url`, or is a node of `head`."""

    url: str = setting(
        "",
        "Origin whose versions this server fetches, keeps and stages; it then takes no pushes. "
        "grpc://HOST:PORT or grpcs://HOST:PORT of a server, or its store as s3://, gs://, az:// "
        "or file:///path.",
        name="follow",
    )
    interval_s: float = setting(
        1,
        "How often to look for versions in a followed store, in seconds.",
        name="follow_interval_s",
        gt=0,
    )
    cache: str = setting(
        "",
        "http://HOST:PORT/PATH or https:// of a cache in front of a followed store: shards are "
        "first requested there, by their key below the store's URL, and each piece is compared "
        "with its BLAKE3 from the store. Only shards are requested there.",
        name="follow_cache",
    )
    ca: Path | None = setting(None, "CA of the origin's certificate, PEM.", name="follow_ca")
    certificate: Path | None = setting(
        None, "Client certificate for the origin, PEM.", name="follow_cert"
    )
    key: Path | None = setting(None, "Key of follow_cert, PEM, no password.", name="follow_key")
    token_file: Path | None = setting(
        None, "Token file for the origin, mode 0600.", name="follow_token_file"
    )
    head: str = setting(
        "",
        "For an engine with ranks on several nodes (vLLM's --nnodes): grpc://HOST:PORT or "
        "grpcs://HOST:PORT of the server on its first node, the head. This server only stages for "
        "the ranks on its node; --follow-ca, -cert, -key and -token-file then apply to the head.",
        name="node_of",
    )
    rank: int = setting(
        0, "With node_of: vLLM's --node-rank on this node, from 1.", name="node_rank", ge=0
    )

    def check(self, store: str) -> None:
        """Refuse with ValueError what cannot be followed, or kept in a `store`."""
        ca, others = bool(self.ca), any((self.certificate, self.key, self.token_file))
        check_node(self.head, self.rank, self.url, ca=ca)
        check_follow(self.url or self.head, store, ca=ca, others=others)
