"""What the class of a trainer has, and what it reports."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from weightsync_client.attach import Attached


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a job.

    Attributes:
        step: Its number in the job.
        loss: Its loss; None: it has none. A tensor with one element is taken for its value.
        tokens: How many tokens it was trained on; None: not known.
    """

    step: int
    loss: float | None = None
    tokens: int | None = None


class Trainer(Protocol):
    """What `weightsync-server --trainer module:Class` names.

    It is made without arguments, in a process of its own, and everything is called by the main
    thread. Processes that it starts must end with it, for it may be killed. It may also have

        save_state(folder: Path) -> None
        load_state(folder: Path) -> None

    for what it keeps beside the weights, as an optimizer does: the first writes that into an empty
    folder, after every version that a job has made live, and the second takes up what was written
    there, when that version is live again or the process was restarted. Without them, or where a
    version has none, a new instance begins. Saving is durable, and each job waits for it: where a
    state is large, write it for some versions only, and leave the folder of the others empty.
    """

    def setup(self, attached: Attached) -> None:
        """Get ready for jobs: build a model over the live parameters, and an optimizer.

        Args:
            attached: The live parameters, which are there for as long as the instance is.
        """

    def train(self, request: Mapping[str, Any], cancelled: threading.Event) -> Iterable[Progress]:
        """Do one job, and yield after each step.

        To change what is served it writes within `with attached.transaction():`, and yields outside
        of it. What it raises is reported to the caller who sent the job; what it had not committed
        by then was undone.

        Args:
            request: What was sent: what JSON can hold.
            cancelled: Set when the job shall end, at the latest a few seconds later. Who yields
                often needs not look at it: the job ends at a yield.
        """
