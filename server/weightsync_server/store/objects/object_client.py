"""The object store as everything here sees it: addresses, bytes, and one kind of refusal.

Obstore's threads do the input and output, so nothing here blocks an event loop. Credentials are
looked for where obstore looks for them, and are never read here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import obstore
from obstore import exceptions, store

from weightsync.backoff import backoff_s
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store.objects.object_keys import SCHEMES

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Bucket


#: Those that obstore reads.
_VARIABLES = {
    "s3": ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
}
_ADDRESS = re.compile(
    r"https?://"
    r"([A-Za-z0-9._~%:-]+@)?"
    r"(\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))"
    r"(:(?P<port>[0-9]{1,5}))?"
    r"(/[A-Za-z0-9._~%/-]*)?",
    re.IGNORECASE,
)
_MAX_PORT = 65535


def check_addresses(scheme: str) -> None:
    """Refuse an environment with a bad store address.

    The refusal names the variable and not its value, which may contain a password.
    """
    for name in _VARIABLES[scheme]:
        value = os.environ.get(name)
        if value is not None and not _is_address(value):
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{name} is not the address of an object store; write http:// or https://, the "
                "host and its port, such as http://127.0.0.1:9000, or unset it",
            )


def _is_address(value: str) -> bool:
    match = _ADDRESS.fullmatch(value)
    if match is None or int(match["port"] or 0) > _MAX_PORT:
        return False
    host = match["ipv6"] or match["host"]
    # What ends in a number is an address of IPv4, or nothing.
    if match["ipv6"] is None and not host.rpartition(".")[2].isdecimal():
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


#: Azure once answered the second one.
_EXISTS = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
#: Its own class is what obstore documents, Python's is what it raises.
ABSENT = (FileNotFoundError, exceptions.NotFoundError)

#: What S3 says of one object where several were to be removed; obstore has no error for it.
_DENIED = "(code: AccessDenied)"

#: One request and all its repetitions, the last of which may begin at the end of that time: shorter
#: than a fetcher's task may take.
_RETRIES: Any = {
    # Their pauses are drawn between the first and twice the last: only the time ends them.
    "max_retries": 1000,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=5),
        "base": 2,
    },
}
_CLIENT = {"connect_timeout": "5s", "timeout": "20s", "user_agent": "weightsync"}
#: Obstore forgets those of the environment where it is given any: AWS_ALLOW_HTTP and so on.
_CLIENT_SETTINGS = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "timeout",
)
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
#: Of creates whose outcome is not known.
_ATTEMPTS = 5
_AT_ONCE = 32


class ObjectFacts(NamedTuple):
    """What the store says of an object; `modified` is by its clock, `tag` varies with the bytes."""

    size: int
    modified: datetime
    tag: str = ""


def split_url(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.netloc or set(parts.netloc) & set("@:"):
        raise _not_a_url(url)
    key = parts.path.strip("/")
    folders = key.split("/") if key else []
    if parts.query or parts.fragment or any(part in ("", ".", "..") for part in folders):
        raise _not_a_url(url)
    return f"{parts.scheme}://{parts.netloc}", key


@cache
def connect(bucket: str) -> Bucket:
    scheme, _, name = bucket.partition("://")
    check_addresses(scheme)
    given = {key: os.environ.get(_PREFIXES[scheme] + key.upper()) for key in _CLIENT_SETTINGS}
    client = _CLIENT | {key: value for key, value in given.items() if value}
    options: dict[str, Any] = {"client_options": client, "retry_config": _RETRIES}
    with refusing(f"reaching {bucket}"):
        if scheme == "s3":
            return store.S3Store(name, **options)
        if scheme == "gs":
            return store.GCSStore(name, **options)
        return store.AzureStore(name, **options)


class ObjectClient:
    """Objects under one URL, such as `s3://bucket/prefix`. Keys are relative to it."""

    def __init__(self, url: str) -> None:
        self._bucket, self._prefix = split_url(url)
        self.url = f"{self._bucket}/{self._prefix}".rstrip("/")

    async def get(self, key: str) -> bytes | None:
        with refusing(f"reading {key}"):
            try:
                found = await obstore.get_async(self._store, self._path(key))
                return bytes(await found.bytes_async())
            except ABSENT:
                return None

    async def get_begin(self, key: str, size: int) -> bytes:
        """Return the first bytes of an object; fewer where it is shorter or not there."""
        with refusing(f"reading {key}"):
            try:
                found = await obstore.get_range_async(
                    self._store, self._path(key), start=0, end=size
                )
            except ABSENT:
                return b""
        return bytes(found)

    async def get_all(self, keys: Sequence[str]) -> dict[str, bytes]:
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(key: str) -> bytes | None:
            async with gate:
                return await self.get(key)

        bodies = await asyncio.gather(*map(one, keys))
        return {key: body for key, body in zip(keys, bodies, strict=True) if body is not None}

    async def put(self, key: str, data: bytes) -> None:
        with refusing(f"writing {key}"):
            await obstore.put_async(self._store, self._path(key), data, use_multipart=False)

    async def create(self, key: str, data: bytes) -> bytes:
        """Put an object where there is none; return the bytes that are there then, ours or not."""
        return (await self.create_or_read(key, data))[1]

    async def create_or_read(self, key: str, data: bytes) -> tuple[bool, bytes]:
        """Put an object where there is none; return whether it surely did, and what is there.

        The object is read back: a reply may be lost, and "it exists" may mean another request of
        ours. After a FAULT it is not known whether it is there.
        """
        failure: WeightSyncError | None = None
        for attempt in range(_ATTEMPTS):
            try:
                if await self.try_create(key, data):
                    return True, data
            except WeightSyncError as error:
                failure = error
            if (found := await self.get(key)) is not None:
                return False, found
            await asyncio.sleep(backoff_s(attempt + 1, 0.05, 0.8))
        raise failure or WeightSyncError(
            Reason.FAULT, f"{self.url} reports that {key} exists, but cannot return it; try again"
        )

    async def try_create(self, key: str, data: bytes) -> bool:
        """Put an object where there is none; return whether the store says that it did."""
        try:
            with refusing(f"creating {key}"):
                await obstore.put_async(self._store, self._path(key), data, mode="create")
        except _EXISTS:
            return False
        return True

    async def is_empty(self) -> bool:
        with refusing(f"listing {self.url}"):
            async for batch in obstore.list(self._store, self._prefix or None, chunk_size=1):
                if batch:
                    return False
        return True

    async def list_under(self, prefix: str) -> dict[str, ObjectFacts]:
        """Return all objects whose key begins with `prefix` and a slash."""
        found: dict[str, ObjectFacts] = {}
        path = self._path(prefix)
        with refusing(f"listing {prefix}"):
            async for batch in obstore.list(self._store, path):
                for meta in batch:
                    key = f"{prefix}{meta['path'][len(path) :]}"
                    found[key] = _facts(meta)
        return found

    async def folders(self) -> list[str]:
        """Return the first parts of all keys that have more than one."""
        with refusing(f"listing {self.url}"):
            found = await obstore.list_with_delimiter_async(self._store, self._prefix or None)
        return sorted(path.rpartition("/")[2] for path in found["common_prefixes"])

    async def head(self, key: str) -> ObjectFacts | None:
        with refusing(f"asking for {key}"):
            try:
                meta = await obstore.head_async(self._store, self._path(key))
            except ABSENT:
                return None
        return _facts(meta)

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are fine."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(key: str) -> None:
            async with gate:
                with contextlib.suppress(*ABSENT):
                    await obstore.delete_async(self._store, self._path(key))

        with refusing(f"removing {len(keys)} objects"):
            await asyncio.gather(*map(one, keys))

    @property
    def _store(self) -> Bucket:
        return connect(self._bucket)

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raise what obstore raises in the block as a refusal, except "not found" and "exists".

    `what` is the act, as the subject of a sentence. The store's words that may tell a signed
    address are left out. Raises REQUEST_INVALID for wrong settings or rights, else FAULT.
    """
    try:
        yield
    except (*ABSENT, *_EXISTS):
        raise
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise _denied(what) from None
    except (exceptions.UnknownConfigurationKeyError, exceptions.InvalidPathError) as error:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"{what} failed: {_gist(error)}; correct the URL or the environment",
        ) from None
    except exceptions.BaseError as error:
        if _DENIED in str(error):
            raise _denied(what) from None
        raise WeightSyncError(
            Reason.FAULT,
            f"{what} failed: no valid answer from the object store ({_gist(error)}); check its "
            "address, the network and the credentials, then try again",
        ) from None


def _denied(what: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.REQUEST_INVALID,
        f"{what} is not allowed for these credentials; give them the rights that "
        "docs/how-to/bucket-and-etcd-rights.md lists",
    )


def _facts(meta: ObjectMeta) -> ObjectFacts:
    return ObjectFacts(meta["size"], meta["last_modified"], meta["e_tag"] or "")


def _gist(error: Exception) -> str:
    first = str(error).partition("\n")[0].partition("<")[0]
    return _without_user(re.sub(r"\?\S*", "", first))[:300].strip(" :")


def _without_user(text: str) -> str:
    return re.sub(r"//[^\s/]*@", "//", text)


def _not_a_url(url: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.NOT_SUPPORTED,
        f"no store can be opened at {_without_user(url)!r}; use s3://bucket/prefix, "
        "gs://bucket/prefix or az://container/prefix without user, port or query; set addresses "
        "in the environment",
    )
