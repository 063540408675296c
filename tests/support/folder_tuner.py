"""The example's trainer on an engine for tests, which does not know where its checkpoint lies."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from examples.serve_and_train import Tuner

if TYPE_CHECKING:
    from weightsync_client.attach import Attached

__all__ = ["FOLDER", "FolderTuner"]

#: Environment variable: the folder.
FOLDER = "TUNER_FOLDER"


class FolderTuner(Tuner):
    """Finds it in the environment."""

    def setup(self, attached: Attached) -> None:
        """Say what vLLM would say."""
        attached.checkpoint = os.environ[FOLDER]
        super().setup(attached)
