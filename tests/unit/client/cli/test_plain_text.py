"""Names that others chose do nothing to a terminal, and an ASCII one shows them, too."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.cli.cli_options import escaped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., tuple[int, str, str]]

_HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nversion 9 is live\u202e\x7f\x9b"


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        ("a b", "utf-8", "a b"),
        ("Gewichte für 模型", "utf-8", "Gewichte für 模型"),
        ("Gewichte für 模型", "ascii", "Gewichte f\\xfcr \\u6a21\\u578b"),
        ("für 模", "latin-1", "für \\u6a21"),
        ("a\x1b[31m\n\t", "utf-8", "a\\x1b[31m\\n\\t"),
        ("a\u202eb\u200b\x9b", "utf-8", "a\\u202eb\\u200b\\x9b"),
        ("\ud800", "utf-8", "\\ud800"),
    ],
)
def test_what_is_no_print_becomes_an_escape(text: str, encoding: str, shown: str) -> None:
    assert escaped(text, encoding) == shown
    assert escaped("a\n\tb\x1b", encoding, lines=True) == "a\n\tb\\x1b"


def _no_control(text: str) -> None:
    assert text
    assert not [char for char in text if not (char.isprintable() or char == "\n")], text
    assert "\nversion 9 is live" not in text


def test_status_versions_and_watches_stay_on_their_lines(
    run: Run, servicer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(save({"w": np.ones(3)}))
    assert run("push", path)[0] == 0
    monkeypatch.setattr(servicer, "models", [_HOSTILE])
    for command in (("status",), ("versions", "--model", _HOSTILE)):
        _, out, err = run(*command)
        _no_control(out + err)
    code, out, err = run("status", "--model", f"x{_HOSTILE}")
    assert code
    _no_control(out + err)


def test_reports_of_others_stay_on_their_lines(run: Run, servicer: Any) -> None:
    servicer.engines = [pb.EngineReport(engine=_HOSTILE, absent=_HOSTILE)]
    _, out, err = run("apply", "0")
    _no_control(out + err)


def _checkpoint(path: Path, value: float) -> Path:
    path.write_bytes(save({"模型.w": np.full(5, value), f"only{value}": np.ones(1)}))
    return path


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_diff_shows_all_names_on_any_terminal(tmp_path: Path, encoding: str) -> None:
    files = [_checkpoint(tmp_path / f"{n}.safetensors", n) for n in (1.0, 2.0)]
    ran = subprocess.run(
        [sys.executable, "-m", "weightsync_client.cli", "diff", *map(str, files)],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C"},
    )
    assert ran.returncode == 0, ran.stderr
    shown = ran.stdout.decode(encoding)
    name = "模型.w" if encoding == "utf-8" else "\\u6a21\\u578b.w"
    assert name in shown
    assert "only in the first: only1.0" in shown


_LOGGING = """
import logging, sys, threading
from weightsync.errors import Reason
from weightsync_client import Client
from weightsync_client.cli.main import main
from weightsync_client.errors import refuse

def push(self, path, **options):
    thread = threading.Thread(target=lambda: 1 / 0, name="sender")
    thread.start()
    thread.join()
    try:
        raise OSError("the cause")
    except OSError:
        logging.getLogger("grpc._channel").exception("Exception iterating requests!")
    logging.getLogger("weightsync_client").warning("have the right one call acquire_epoch()")
    raise refuse(Reason.ENGINE_REFUSED, "the model has no place for these tensors\x1b; leave them")

Client.push = push
sys.argv = ["weightsync", "push", "x"]
main()
"""


def test_a_refusal_inside_a_push_is_a_sentence_and_no_traceback() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _LOGGING], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (4, "")
    assert ran.stderr.splitlines() == [
        "weightsync: thread sender ended with ZeroDivisionError: division by zero",
        "weightsync: Exception iterating requests! (OSError: the cause)",
        "weightsync: have the right one run `weightsync epoch`",
        "weightsync: the model has no place for these tensors\\x1b; leave them",
    ]
