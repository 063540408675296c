"""The name under which a server's open pushes lie in a store that several servers use."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from weightsync_server.store.documents import read_document, write_document

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["server_identity"]

logger = logging.getLogger(__name__)

_FILE, _KEY = "identity.json", "identity"


def server_identity(state_dir: Path) -> str:
    """Return the name of the server whose state this is: made at its first start, then kept.

    Args:
        state_dir: Its state directory, which exists.

    Raises:
        OSError: The name can be neither read nor written.
    """
    path = state_dir / _FILE
    try:
        return str(read_document(path)[_KEY])
    except FileNotFoundError:
        pass
    except (ValueError, KeyError) as error:
        logger.warning("%s is damaged (%s): open pushes of before begin again", path, error)
    identity = secrets.token_hex(16)
    write_document(path, {_KEY: identity})
    return identity
