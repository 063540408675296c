"""The authority file: who may do what, reread when it changes."""

from __future__ import annotations

import datetime as dt
import json
import logging
import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.auth.principals import TOKEN_HASH, Principal, Principals, Token
from weightsync_server.auth.roles import Role
from weightsync_server.auth.secret_files import read_private, stamp

__all__ = ["AuthorityFile", "parse_authority"]

logger = logging.getLogger(__name__)

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
                raise ValueError(f"a {kind} stands there twice: each names one principal")
        return self


def parse_authority(data: bytes, *, as_json: bool = False) -> Principals:
    """Return the principals of an authority file.

    Args:
        data: TOML, or JSON of the same shape.
        as_json: Which of them.

    Raises:
        ValueError: With what is wrong, and never what stood there.
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
    """The principals of a file. One that changed to something broken keeps those from before.

    Args:
        path: TOML, or JSON when it ends in .json.

    Raises:
        WeightSyncError: REQUEST_INVALID; it cannot be used.
    """

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
                logger.error("what was read before stays in force: %s", error)  # noqa: TRY400 - the sentence says it all
        return self._principals

    def _read(self) -> Principals:
        data = read_private(self._path, "the authority file")
        try:
            return parse_authority(data, as_json=self._path.suffix == ".json")
        except ValueError as error:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"the authority file {self._path} is not right: {error}; correct it",
            ) from None
