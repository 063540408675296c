"""An engine's own parameters as tensors of this process; PyTorch is loaded with it."""

from __future__ import annotations

from weightsync_client.attach.attached import Attached, AttachedBox, attach, trainer_job
from weightsync_client.attach.transaction import InPlaceTransaction, Writing

__all__ = ["Attached", "AttachedBox", "InPlaceTransaction", "Writing", "attach", "trainer_job"]
