"""Who may call: principals with roles, and how a call proves to be one of them."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync_server.auth.roles import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["EVERYBODY", "TOKEN_HASH", "Principal", "Principals", "Token", "new_token", "token_hash"]

#: How a token is written down.
TOKEN_HASH = re.compile(r"sha256:[0-9a-f]{64}")
#: Random bytes of a token: nobody guesses it, so a plain hash keeps it.
_TOKEN_BYTES = 32


def new_token() -> str:
    """Return a fresh token of 256 random bits."""
    return f"ws_{secrets.token_urlsafe(_TOKEN_BYTES)}"


def token_hash(token: str) -> str:
    """Return what the authority file keeps of a token."""
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Token:
    """A token at rest.

    Attributes:
        hash: `token_hash` of it.
        expires: When it ends, Unix time in seconds; 0: never.
    """

    hash: str
    expires: float = 0.0

    def matches(self, digest: str) -> bool:
        """Return whether this is the token with that hash, in time that tells nothing about it."""
        same = hmac.compare_digest(self.hash, digest)
        return same and not 0 < self.expires <= clock.wall()


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody with authority.

    Attributes:
        name: For audit lines and limits.
        roles: What it may do.
        models: Names of models for which; `*`: all.
        certificates: Names in client certificates that prove it.
        tokens: Bearer tokens that prove it.
    """

    name: str
    roles: frozenset[Role]
    models: frozenset[str] = frozenset({"*"})
    certificates: frozenset[str] = frozenset()
    tokens: tuple[Token, ...] = ()

    def covers(self, model: str) -> bool:
        """Return whether its roles hold for a model."""
        return "*" in self.models or model in self.models


#: Whoever connects where nothing is asked: loopback and unix sockets without an authority file.
EVERYBODY = Principal("everybody", frozenset(Role))


class Principals:
    """All principals, by certificate name and by token.

    Args:
        principals: Those of one authority file.
    """

    def __init__(self, principals: Iterable[Principal]) -> None:
        self._all = tuple(principals)
        self._by_name = {name: one for one in self._all for name in one.certificates}

    @property
    def has_tokens(self) -> bool:
        """Whether any principal has a token."""
        return any(one.tokens for one in self._all)

    @property
    def has_certificates(self) -> bool:
        """Whether any principal has a certificate name."""
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
