"""An engine's own parameters as tensors of this process; PyTorch is loaded with it."""

from __future__ import annotations

from weightsync_client.attach.attached import Attached, AttachedBox, attach

__all__ = ["Attached", "AttachedBox", "attach"]
