"""An engine's own parameters as tensors of this process; PyTorch is loaded with it."""

from __future__ import annotations

from weightsync_client.attach.attached import Attached, AttachedBox, attach
from weightsync_client.attach.in_place import InPlaceTransaction
from weightsync_client.attach.trainer_job import trainer_job
from weightsync_client.attach.transaction_call import Writing

__all__ = ["Attached", "AttachedBox", "InPlaceTransaction", "Writing", "attach", "trainer_job"]
