"""A child of the server: it greets, gets its settings, and logs as its server does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from weightsync.log_lines import JSON, TEXT
from weightsync.wire import child_channel

_CHILD = """
import logging
from weightsync.wire import child_channel
start = child_channel.begin(child_channel.connect())
logging.getLogger("x").info("a child of %s", start["place"])
raise ValueError("its\\nend")
"""


@pytest.mark.parametrize("form", [TEXT, JSON])
def test_a_child_logs_as_its_server_does(form: str) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", _CHILD, str(theirs.fileno())]
    pipe = subprocess.PIPE
    with (
        ours,
        theirs,
        subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=pipe, text=True) as child,
    ):
        assert child_channel.receive(ours)[0]["op"] == "hello"
        log = {"form": form, "level": "INFO"} | ({"model": "policy"} if form == JSON else {})
        start = {"op": "start", "parent": os.getpid(), "log": log, "place": 3}
        ours.sendall(child_channel.encode(start))
        _, said = child.communicate(timeout=30)
    lines = said.splitlines()
    if form == TEXT:
        assert lines[0].endswith(" INFO x: a child of 3")
        assert lines[-1] == "end"
        return
    first, last = map(json.loads, lines)
    assert (first["message"], first["model"]) == ("a child of 3", "policy")
    assert (last["event"], last["level"]) == ("uncaught", "CRITICAL")
    assert last["exception"].endswith("ValueError: its\nend")
