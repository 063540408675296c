"""The channel of a trainer's process; the rest is in tests/extensions/test_train_service.py."""

from __future__ import annotations

import os
import signal
import socket
import warnings

from weightsync_client.trainer.trainer_process import _TrainerProcess


def test_a_process_that_is_forked_keeps_no_end_of_the_channel() -> None:
    ours, theirs = socket.socketpair()
    process = _TrainerProcess(theirs, {})
    with warnings.catch_warnings():
        # There may be threads; the child needs nothing that they might hold locked.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        # As when the trainer dies while a data loader of its own lives on.
        process._sock.close()
        ours.settimeout(10)
        assert ours.recv(1) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ours.close()
