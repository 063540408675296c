"""The origin that `--follow` names, checked before anything is started."""

from __future__ import annotations

from urllib.parse import urlsplit

from weightsync.wire.addresses import is_private
from weightsync_server.store.objects.object_keys import is_location

__all__ = ["check_cache", "check_follow", "grpc_target", "is_encrypted"]

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
    """Refuse a cache that cannot be asked, or that stands before nothing.

    Args:
        cache: Its URL; empty: there is none.
        url: The origin; empty: none is followed.

    Raises:
        ValueError: Naming the remedy.
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
            "the store lie, without user, password or query"
        )


def check_follow(url: str, store: str, *, ca: bool, others: bool) -> None:
    """Refuse what cannot be followed, or cannot be kept.

    Args:
        url: The origin; empty: none is followed.
        store: Where this server keeps versions; empty: in a folder of its own.
        ca: Authorities of the origin's certificate are given.
        others: Other files for it are given: a certificate, its key, a token.

    Raises:
        ValueError: Naming the remedy.
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
            f"follow names {url}, which other hosts could read and change on the way; use "
            "grpcs://HOST:PORT, or give --follow-ca"
        )
    if (ca or others) and not target:
        raise ValueError(
            "follow_ca, follow_cert, follow_key and follow_token_file are for an origin at grpc:// "
            "or grpcs://; credentials of a store come from the environment"
        )
    if store == "memory://" or is_location(store):
        raise ValueError(
            f"a follower keeps what it fetches in a folder, not in {store}; name a folder with "
            "--store, or leave that out"
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
    elif is_location(url):
        return
    else:
        parts = urlsplit(url)
        plain = not (parts.netloc or parts.query or parts.fragment)
        if parts.scheme in ("file", "") and plain and parts.path.startswith("/"):
            return
    raise ValueError(f"follow cannot be {url!r}; use {_FORMS}")
