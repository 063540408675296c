from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from safetensors.numpy import save_file

from weightsync import __version__
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.cli.cli_options import MEANINGS
from weightsync_client.cli.render import size

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(100_000, dtype=np.float32), "b": np.ones(3)}, path)
    return path


def test_push_apply_rollback_and_reading_back(run: Run, weights: Path, tmp_path: Path) -> None:
    code, out, err = run("push", weights, "--metadata", "step=3", "--streams", "2")
    assert (code, err) == (0, "")
    assert out.startswith("version 1 committed: 2 tensors, 400.2 kB, in ")
    code, out, _ = run("push", weights, "--json")
    assert json.loads(out)["version"] == 2
    plan = run("apply", "1", "--dry-run")[1]
    assert plan.startswith("version 1 would be applied")
    assert "pause not known yet" in plan
    assert run("apply", "--cache", "keep")[1].startswith(
        "version 2 is live (before: 1); paused 12.5"
    )
    code, out, _ = run("apply", "2", "--json")
    assert json.loads(out)["phases"]["paused_total_s"] == 0.0125
    code, out, _ = run("versions")
    assert [line.split()[0] for line in out.splitlines()] == ["version", "2", "1"]
    assert "live" in out.splitlines()[1]
    assert out.splitlines()[2].endswith("  step=3")
    code, out, _ = run("versions", "--json")
    assert [v["metadata"] for v in json.loads(out)] == [{}, {"step": "3"}]
    assert (
        json.loads(run("versions", "1", "--json")[1])["commit_time"] == "2025-06-15T15:06:40+00:00"
    )
    code, out, _ = run("pull", tmp_path / "out")
    assert code == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights.read_bytes()
    assert "now rejected" in run("rollback", "--reason", "worse")[1]
    assert json.loads(run("pin", "1", "--json")[1])["pinned"] is True
    assert "pinned" not in run("pin", "1", "--undo")[1]
    assert run("epoch")[1] == "1\n"
    assert run("delete", "2")[1] == "version 2 deleted\n"
    assert run("abort", "push-5")[0] == 0


def test_commands_name_engines_and_their_order(run: Run, weights: Path, servicer: Any) -> None:
    run("push", weights)
    run("push", weights)
    rolling = ["--engine", "e1", "--order", "rolling", "--max-unavailable", "2"]
    assert run("apply", "2", *rolling)[0] == run("rollback", *rolling)[0] == 0
    named = [one for one in servicer.requests if getattr(one, "engine", "") == "e1"]
    assert [type(one) for one in named] == [pb.ApplyVersionRequest, pb.RollbackRequest]
    assert {one.max_unavailable for one in named} == {2}
    assert {one.order for one in named} == {pb.ENGINE_ORDER_ROLLING}
    assert run("verify", "--engine", "e1")[0] == 0
    assert servicer.requests[-1].engine == "e1"
    code, _, err = run("apply", "--order", "first")
    assert (code, "use one of together, rolling" in err) == (2, True)
    servicer.engines = [pb.EngineReport(engine="e2", absent="it does not answer")]
    found = json.loads(run("apply", "--json")[1])["engines"]
    assert found == [{"engine": "e2", "report": None, "absent": "it does not answer"}]


def test_status(run: Run) -> None:
    code, out, _ = run("status")
    assert (code, "model policy: live none" in out, "engine serving" in out) == (0, True, True)
    assert json.loads(run("status", "--json")[1])["models"][0]["engine"]["state"] == "serving"


def test_status_of_a_model(run: Run, servicer: Any) -> None:
    assert run("status", "--model", "policy")[0] == 0
    refused = run("status", "--model", "nope")
    assert refused == (
        3,
        "",
        "weightsync: model 'nope' is not configured; this server has 'policy'\n",
    )
    servicer.models = ["policy", "critic"]
    code, out, _ = run("status", "--model", "critic")
    assert (code, "model critic" in out, "model policy" in out) == (0, True, False)
    code, out, _ = run("status", "--json")
    assert [one["model"] for one in json.loads(out)["models"]] == ["policy", "critic"]


def test_status_without_vllm_names_no_version_of_it(run: Run) -> None:
    assert "  engine serving bridge\n" in run("status")[1]


@pytest.mark.parametrize(
    ("sentence", "shown"),
    [
        (
            "version 1 of model m is pinned; unpin it first",
            "version 1 of model m is pinned; unpin it first with `weightsync pin --undo`",
        ),
        (
            "version 1 is rejected (worse); set clear_rejected to apply it anyway",
            "version 1 is rejected (worse); give --clear-rejected to apply it anyway",
        ),
        (
            "version 1 is the one that a rollback uses; delete it with force if it may go",
            "version 1 is the one that a rollback uses; delete it with --force if it may go",
        ),
        (
            "call acquire_epoch() (`weightsync epoch`), or give epoch=5 if this belongs to it",
            "run `weightsync epoch`, or give --epoch 5 if this belongs to it",
        ),
        (
            "version 7 is damaged; name another one with base=, or push all tensors",
            "version 7 is damaged; name another one with --keep, or push all tensors",
        ),
        (
            "give pause.wait_timeout up to 5 s, use order ROLLING, or raise undecided_limit_s",
            "give --wait-timeout up to 5 s, use --order rolling, or raise undecided_limit_s",
        ),
        (
            "convert tensor 'w' to BF16, or push without dtype='exact' to have that done",
            "convert tensor 'w' to BF16, or push without --dtype exact to have that done",
        ),
        (
            "restore finite weights, or push without check_finite: element 5",
            "restore finite weights, or push without --check-finite: element 5",
        ),
        (
            "reader may not call ApplyVersion; use Rollback",
            "reader may not call `weightsync apply`; use `weightsync rollback`",
        ),
        (
            "reader may not call /weightsync.v1.WeightSync/ApplyVersion; it takes role apply",
            "reader may not call `weightsync apply`; it takes role apply",
        ),
    ],
)
def test_remedies_are_told_as_this_command_does_them(
    run: Run, servicer: Any, sentence: str, shown: str
) -> None:
    def refuse(_method: str, _request: Any) -> None:
        raise WeightSyncError(Reason.VERSION_IN_USE, sentence)

    servicer.before = refuse
    assert run("versions", "--model", "policy") == (4, "", f"weightsync: {shown}\n")


def test_a_diff_that_nobody_watches_has_whole_names(run: Run, tmp_path: Path) -> None:
    name = "model.layers." + "x" * 300
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        save_file({name: np.full(9, value)}, tmp_path / folder / "model.safetensors")
    code, out, _ = run("diff", tmp_path / "a", tmp_path / "b")
    assert (code, [line for line in out.splitlines() if name in line]) != (0, [])
    assert name in out.splitlines()[1]
    assert out.splitlines()[1].split()[1] == "F64"


def test_a_diff_of_nothing_names_no_ratio(run: Run, weights: Path) -> None:
    code, out, err = run("diff", weights, weights)
    assert (code, err) == (0, "")
    assert "inf" not in out
    assert out.splitlines()[1] == "delta 0 B, with zstd 0 B, dense 400.0 kB"


@pytest.mark.parametrize("place", [0, 1])
def test_the_address_may_stand_on_either_side_of_the_command(
    run: Run, running: Any, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("WEIGHTSYNC_NAME", "other")
    arguments = ["status"]
    arguments[place:place] = ["--address", running.address, "--model", "policy"]
    code, out, _ = run(*arguments)
    assert (code, "model policy" in out) == (0, True)


def test_what_comes_after_the_command_goes_before_what_comes_before_it(
    run: Run, running: Any
) -> None:
    assert run("--address", "127.0.0.1:1", "status", "--address", running.address)[0] == 0
    code, _, err = run("--address", "127.0.0.1:1", "status")
    assert (code, "no answer from 127.0.0.1:1 to the query" in err) == (5, True)


def test_status_asks_the_standard_health_service(
    run: Run, start_server: Any, servicer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = health.HealthServicer()
    server = start_server(
        servicer, add=lambda server: health_pb2_grpc.add_HealthServicer_to_server(service, server)
    )
    monkeypatch.setenv("WEIGHTSYNC_ADDRESS", server.address)
    service.set("push", health_pb2.HealthCheckResponse.SERVING)
    service.set("serving", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert run("status", "--exit-code", "--service", "push")[:2] == (0, "push: serving\n")
    assert run("status", "--exit-code", "--service", "serving")[:2] == (5, "serving: not serving\n")
    assert run("status", "--service", "serving", "--json")[:2] == (
        0,
        '{\n  "service": "serving",\n  "serving": false\n}\n',
    )
    assert run("status", "--exit-code", "--service", "other")[0] == 3
    service.set("", health_pb2.HealthCheckResponse.SERVING)
    assert run("status", "--exit-code")[0] == 0
    server.stop()


def test_verify_tells_by_its_exit_code(run: Run, weights: Path) -> None:
    run("push", weights)
    run("apply")
    assert run("verify")[0] == 0
    code, out, _ = run("verify", "1")
    assert (code, out.startswith("every rank holds version 1")) == (0, True)
    run("push", weights)
    code, out, err = run("verify", "2", "--json")
    assert (code, json.loads(out)["verified"], err) == (6, False, "")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.REQUEST_INVALID, 2),
        (Reason.MODEL_UNKNOWN, 3),
        (Reason.EPOCH_STALE, 4),
        (Reason.ENGINE_AWAY, 5),
        (Reason.DATA_CORRUPT, 6),
        (Reason.NO_SLOT, 7),
        (Reason.DEADLINE_EXCEEDED, 8),
    ],
)
def test_errors_are_one_sentence_and_a_code(
    run: Run, servicer: Any, reason: Reason, code: int
) -> None:
    def refuse(method: str, _request: Any) -> None:
        if method == "ListVersions":
            raise WeightSyncError(reason, "this is why; do that")

    servicer.before = refuse
    assert run("versions") == (code, "", "weightsync: this is why; do that\n")


def test_denied(run: Run, servicer: Any, status_error: Any) -> None:
    def refuse(_method: str, _request: Any) -> None:
        raise status_error(grpc.StatusCode.UNAUTHENTICATED, "no token")

    servicer.before = refuse
    code, _, err = run("versions", "--model", "policy")
    assert (code, "check the token" in err) == (9, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["push"], "Missing argument"),
        (["push", "x", "--metadata", "nope"], "--metadata 'nope' is not KEY=VALUE"),
        (["apply", "1", "--pause", "stop"], "pause is 'stop'; use one of"),
        (["apply", "one"], "valid int"),
        (["apply", "--", "-3"], "Invalid value for"),
        (["apply", str(2**64)], "Invalid value for"),
        (["push", "x", "--version", "-1"], "Invalid value for"),
        (["push", "x", "--version", "9" * 20], "Invalid value for"),
        (["push", "x", "--epoch", "-1"], "Invalid value for"),
        (["versions", "--", "-1"], "Invalid value for"),
        (["pull", "x", "--", "-1"], "Invalid value for"),
        (["verify", "--", "-1"], "Invalid value for"),
        (["pin", "--", "-1"], "Invalid value for"),
        (["delete", "--", "-1"], "Invalid value for"),
        (["diff", "9" * 20, "x"], "99999999999999999999"),
        (["status", "--address", "http://127.0.0.1:1"], "use HOST:PORT without http://"),
        (["status", "--address", "127.0.0.1:99999"], "ports end at 65535"),
        (["status", "--address", "foo"], "'foo', which has no port; use HOST:PORT"),
        (["--address", "foo", "status"], "'foo', which has no port; use HOST:PORT"),
        (["fly"], "No such command"),
        (["push", "/nowhere"], "cannot be read"),
    ],
)
def test_wrong_use(run: Run, arguments: list[str], sentence: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err


def test_no_server(run: Run) -> None:
    code, out, err = run("status", "--address", "127.0.0.1:1")
    assert (code, out) == (5, "")
    assert err.startswith("weightsync: no answer from 127.0.0.1:1 to the query for the status")
    assert err.count("\n") == 1


def test_a_fault_of_ours_is_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync_client.client.Client.versions", lambda _: 1 / 0)
    code, _, err = run("versions")
    assert (code, err.startswith("weightsync: ZeroDivisionError")) == (1, True)
    assert "Traceback" not in err


def test_help_tells_the_exit_codes(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for number, meaning in MEANINGS.items():
        assert f"{number:>5}  {meaning}\n" in out
    assert run("--version")[1] == f"{__version__}\n"


def program(*arguments: str) -> list[str]:
    # Interrupts count also where these tests run in the background of a shell, which ignores them.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = "from weightsync_client.cli import main; main()"
    return [sys.executable, "-c", f"{heed}; {run}", *arguments]


def test_watch_prints_lines_until_it_is_interrupted(running: Any, run: Run, weights: Path) -> None:
    run("push", weights)
    process = subprocess.Popen(
        program("watch", "--json", "--address", running.address),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    run("push", weights)
    second = json.loads(process.stdout.readline())
    assert [first["version"]["version"], second["version"]["version"]] == [1, 2]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, "")


def interrupted(running: Any, begun: threading.Event, *arguments: str) -> str:
    """Interrupt a command once something has begun; return what it says of that."""
    process = subprocess.Popen(
        program(*arguments, "--address", running.address),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert begun.wait(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err.count("\n")) == (130, "", 1)
    return str(err).removeprefix("weightsync: interrupted; ").rstrip("\n")


def test_an_interrupt_while_bytes_are_sent_says_that_the_push_was_dropped(
    running: Any, weights: Path
) -> None:
    begun = threading.Event()

    def hold(_chunk: Any) -> None:
        begun.set()
        time.sleep(0.5)

    running.servicer.chunk = hold
    told = interrupted(running, begun, "push", str(weights))
    assert told == "the push was dropped, and no version was made"
    assert running.servicer.uploads["push-0"].aborted


@pytest.mark.parametrize("committed", [True, False])
def test_an_interrupt_of_a_commit_says_whether_it_came_too_late(
    running: Any, weights: Path, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    begun = threading.Event()
    commit = type(running.servicer)._commit

    def slow(servicer: Any, upload: Any, request: Any) -> Any:
        reply = commit(servicer, upload, request) if committed else None
        begun.set()
        servicer.lock.release()
        time.sleep(1)
        servicer.lock.acquire()
        return reply or commit(servicer, upload, request)

    monkeypatch.setattr(type(running.servicer), "_commit", slow)
    told = interrupted(running, begun, "push", str(weights))
    if committed:
        assert told == "the push is committed as version 1; delete that instead"
    else:
        assert told == "the push was dropped, and no version was made"


def test_an_interrupt_says_where_to_look_when_the_server_does_not(
    running: Any, weights: Path
) -> None:
    begun = threading.Event()

    def away(method: str, _request: Any) -> None:
        if method == "CommitPush":
            begun.set()
            time.sleep(1)
        if method == "AbortPush":
            raise WeightSyncError(Reason.FAULT, "no answer for you")

    running.servicer.before = away
    told = interrupted(running, begun, "push", str(weights))
    assert told.startswith("`weightsync versions` shows whether the version is committed")


def test_an_interrupt_of_an_apply_says_that_the_server_goes_on(
    running: Any, run: Run, weights: Path
) -> None:
    run("push", weights)
    begun = threading.Event()

    def slow(method: str, _request: Any) -> None:
        if method == "ApplyVersion":
            begun.set()
            time.sleep(1)

    running.servicer.before = slow
    assert "the server continues" in interrupted(running, begun, "apply")


def test_the_progress_bar_is_for_terminals(running: Any, weights: Path) -> None:
    def push(stderr: int) -> bytes:
        command = program("push", str(weights), "--json", "--address", running.address)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, check=True)
        assert json.loads(done.stdout)["tensor_count"] == 1
        return done.stderr or b""

    save_file({"w": np.ones(1_000_000)}, weights)
    assert push(subprocess.PIPE) == b""
    running.servicer.chunk = lambda _chunk: time.sleep(0.15)
    master, terminal = pty.openpty()
    push(terminal)
    os.close(terminal)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert "push" in shown
    assert "/8.0 MB" in shown
    assert "B/s" in shown


def test_metadata_is_cut_and_tells_a_terminal_nothing(run: Run, weights: Path) -> None:
    assert run("push", weights, "--metadata", "a=\x1b[31m", "--metadata", f"b={'x' * 99}")[0] == 0
    line = run("versions")[1].splitlines()[1]
    assert line.endswith("  a=?[31m b=" + "x" * 67 + "...")


def test_output_into_a_closed_pipe_is_quiet(running: Any, run: Run, weights: Path) -> None:
    run("push", weights)
    command = " ".join(map(repr, program("versions", "--json", "--address", running.address)))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | true"], capture_output=True, check=False
    )
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr


def test_size() -> None:
    assert [size(n) for n in (0, 999, 1000, 1_500_000, 2 * 10**9, 3 * 10**12)] == [
        "0 B", "999 B", "1.0 kB", "1.5 MB", "2.0 GB", "3.0 TB",
    ]  # fmt: skip
