"""What a trainer that weightsync-server supervises is written with, and the process that runs it.

The server runs `python -m weightsync_client.trainer` with the class that its `--trainer` names.
"""

from __future__ import annotations

from weightsync_client.trainer_base import Progress, Trainer

__all__ = ["Progress", "Trainer"]
