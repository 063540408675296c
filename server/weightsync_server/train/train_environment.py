"""What the trainer's process inherits of the server's environment: nothing secret."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from weightsync import failpoints

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["trainer_environment"]

#: Our own settings, and those of clouds, of which not every name says that it is a secret.
_OURS_AND_CLOUDS = ("WEIGHTSYNC_", "AWS_", "AZURE_", "GOOGLE_", "GCS_")
#: Words of names whose values prove something to somebody.
_SECRET = frozenset(
    {"AUTH", "AUTHORIZATION", "CREDENTIAL", "CREDENTIALS", "KEY", "KEYS", "PASS", "PASSWD"}
    | {"PASSPHRASE", "PASSWORD", "PAT", "SECRET", "SECRETS", "TOKEN", "TOKENS", "APIKEY"}
)


def trainer_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without settings of the server, tokens, keys and passwords.

    Args:
        variables: Those of the server.
    """
    return {name: value for name, value in variables.items() if not _is_secret(name)}


def _is_secret(name: str) -> bool:
    if name == failpoints.VARIABLE:
        return False
    plain = name.upper()
    return plain.startswith(_OURS_AND_CLOUDS) or bool(_SECRET & set(re.split(r"[^A-Z]+", plain)))
