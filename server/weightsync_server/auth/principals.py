"""Who may call: principals with roles, read from the authority file, reread when it changes."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import json
import logging
import re
import secrets
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weightsync import clock
from weightsync.errors import WeightSyncError, invalid_request
from weightsync_server.auth.roles import Role
from weightsync_server.auth.tls import read_private, stamp

logger = logging.getLogger(__name__)


#: How a token is written down.
TOKEN_HASH = re.compile(r"sha256:[0-9a-f]{64}")
#: Random bytes of a token: nobody guesses it, so a plain hash keeps it.
_TOKEN_BYTES = 32


def new_token() -> str:
    return f"ws_{secrets.token_urlsafe(_TOKEN_BYTES)}"


def token_hash(token: str) -> str:
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Token:
    """A token at rest; `expires` is Unix time in seconds, 0: never."""

    hash: str
    expires: float = 0.0

    def matches(self, digest: str) -> bool:
        """Return whether this is the token with that hash, in time that tells nothing about it."""
        same = hmac.compare_digest(self.hash, digest)
        return same and not 0 < self.expires <= clock.wall()


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody with authority over `models` (`*`: all); `name` is for audit lines and limits.

    A client certificate with one of the names `certificates`, or a bearer token, proves it.
    """

    name: str
    roles: frozenset[Role]
    models: frozenset[str] = frozenset({"*"})
    certificates: frozenset[str] = frozenset()
    tokens: tuple[Token, ...] = ()

    def covers(self, model: str) -> bool:
        return "*" in self.models or model in self.models


#: Whoever connects where nothing is asked: loopback and unix sockets without an authority file.
EVERYBODY = Principal("everybody", frozenset(Role))


class Principals:
    def __init__(self, principals: Iterable[Principal]) -> None:
        self._all = tuple(principals)
        self._by_name = {name: one for one in self._all for name in one.certificates}

    @property
    def has_tokens(self) -> bool:
        return any(one.tokens for one in self._all)

    @property
    def has_certificates(self) -> bool:
        return bool(self._by_name)

    def by_token(self, token: str) -> Principal | None:
        """Return whose token it is. Every hash is compared, whichever matches."""
        digest, found = token_hash(token), None
        for one in self._all:
            for known in one.tokens:
                if known.matches(digest):
                    found = one
        return found

    def by_certificate(self, names: Sequence[str]) -> Principal | None:
        """Return whose certificate it is; None also when its names belong to several."""
        found = {id(one): one for name in names if (one := self._by_name.get(name))}
        return next(iter(found.values())) if len(found) == 1 else None


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@:/-]{0,127}$"
_MODEL = r"^(\*|[A-Za-z0-9][A-Za-z0-9._-]{0,127})$"


class _Strict(BaseModel):
    # Inputs are kept out of errors: somebody may have written a token where its hash belongs.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class _TokenEntry(_Strict):
    hash: str = Field(pattern=f"^{TOKEN_HASH.pattern}$")
    expires: dt.datetime | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_text(cls, value: Any) -> Any:
        return {"hash": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_zone(self) -> Self:
        if self.expires is not None and self.expires.tzinfo is None:
            raise ValueError("expires needs a time zone, such as 2027-01-31T00:00:00Z")
        return self

    def token(self) -> Token:
        return Token(self.hash, self.expires.timestamp() if self.expires else 0.0)


class _PrincipalEntry(_Strict):
    name: str = Field(pattern=_NAME)
    roles: list[Role] = Field(min_length=1)
    models: list[Annotated[str, Field(pattern=_MODEL)]] = Field(min_length=1)
    certificates: list[Annotated[str, Field(min_length=1, max_length=512)]] = []
    tokens: list[_TokenEntry] = []

    def principal(self) -> Principal:
        return Principal(
            self.name,
            frozenset(self.roles),
            frozenset(self.models),
            frozenset(self.certificates),
            tuple(entry.token() for entry in self.tokens),
        )


class _Document(_Strict):
    principal: list[_PrincipalEntry] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_distinct(self) -> Self:
        for kind, keys in (
            ("principal", [one.name for one in self.principal]),
            ("certificate name", [name for one in self.principal for name in one.certificates]),
            ("token hash", [entry.hash for one in self.principal for entry in one.tokens]),
        ):
            if len(keys) != len(set(keys)):
                raise ValueError(f"give each {kind} to one principal: one is listed twice")
        return self


def parse_authority(data: bytes, *, as_json: bool = False) -> Principals:
    """Return the principals of an authority file, which is TOML, or JSON of the same shape.

    Raises a ValueError that says what is wrong, and never what stood there.
    """
    try:
        text = data.decode()
        document = _Document.model_validate(json.loads(text) if as_json else tomllib.loads(text))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the file"
        raise ValueError(f"{where}: {problem['msg']}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return Principals(entry.principal() for entry in document.principal)


class AuthorityFile:
    """The principals of a TOML or .json file; a broken change keeps those from before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = stamp(path)
        self._principals = self._read()

    def current(self) -> Principals:
        """Return the principals of this moment: one look at the file's status per call."""
        now = stamp(self._path)
        if now != self._stamp:
            self._stamp = now
            try:
                self._principals = self._read()
                logger.info("read %s again", self._path)
            except WeightSyncError as error:
                logger.error("the previous content stays in force: %s", error)  # noqa: TRY400 - the sentence says it all
        return self._principals

    def _read(self) -> Principals:
        data = read_private(self._path, "the authority file")
        try:
            return parse_authority(data, as_json=self._path.suffix == ".json")
        except ValueError as error:
            raise invalid_request(f"correct the authority file {self._path}: {error}") from None
