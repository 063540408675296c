"""What a server refuses to start with, and where no secret may be: A3, A14, A18 to A20."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import psutil
import pytest

from tests.support.certificates import Authority
from tests.support.secured import METHODS, Secured, authority_text, code_of
from weightsync_server.auth.principals import new_token, token_hash

STATUS = "/weightsync.v1.WeightSync/GetStatus"


def _seldom(*cases: tuple[object, ...]) -> list[Any]:
    """Return cases that cost a process each and that CI leaves to the battery."""
    return [pytest.param(*case, marks=pytest.mark.battery) for case in cases]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="wss"))
    yield path
    shutil.rmtree(path)


def _start(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightsync_server.cli", "--store=memory://", "--metrics="]
    command += [f"--run-dir={folder}/run", f"--state-dir={folder}/state", *flags]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
        env=os.environ | variables,
    )


def _file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "authority.toml"
    path.write_text(text)
    path.chmod(mode)
    return f"--authority={path}"


def _good(**principal: object) -> str:
    fields = {"name": "a", "roles": ["read"], "models": ["*"], "tokens": [token_hash("t")]}
    return authority_text([fields | principal])


def test_an_open_address_needs_tls_and_an_authority_file(folder: Path) -> None:
    pair = Authority(folder / "pki").sign("server", "localhost")
    tls = (f"--tls-cert={pair.certificate}", f"--tls-key={pair.key}")
    listen = "--listen=0.0.0.0:0"
    cases = {
        "give --tls-cert and --tls-key": (listen,),
        "give --tls-cert and": (listen, _file(folder, _good())),
        "give --authority FILE": (listen, *tls),
        "tls_cert and tls_key go together": (listen, tls[0], _file(folder, _good())),
        "tls_client_ca needs both": (f"--tls-client-ca={pair.certificate}",),
    }
    for sentence, flags in cases.items():
        ran = _start(folder, *flags)
        assert (ran.returncode, sentence in ran.stderr) == (2, True), (flags, ran.stderr)
        assert len(ran.stderr.splitlines()) == 1
    assert not (folder / "state").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "principal: Field required"),
        ("[[principal", "correct the authority file"),
        (_good(tokens=["ws_in_the_clear"]), "tokens.0.hash"),
        (_good(tokens=[], certificates=["c"]), "no caller can be authenticated"),
        *_seldom(
            ("principal = []", "at least 1 item"),
            (_good(roles=["root"]), "roles.0"),
            (_good(roles=[]), "roles"),
            (_good(models=[]), "models"),
            (_good(models=["../x"]), "models.0"),
            (_good(name="a\nb"), "name"),
            (_good(secret="x"), "secret: Extra inputs"),
            (_good() + _good(), "one is listed twice"),
            (_good() + _good(name="b"), "one is listed twice"),
            (_good(tokens=[]), "certificate names and --tls-client-ca"),
        ),
    ],
)
def test_a_wrong_authority_file_is_refused_in_one_sentence(
    folder: Path, text: str, sentence: str
) -> None:
    ran = _start(folder, _file(folder, text))
    assert (ran.returncode, sentence in ran.stderr) == (1, True), ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert "in_the_clear" not in ran.stderr


@pytest.mark.parametrize("mode", [0o620, *_seldom((0o602,), (0o604,), (0o666,)), 0o644])
def test_a_file_that_others_may_read_or_change_is_refused(folder: Path, mode: int) -> None:
    ran = _start(folder, _file(folder, _good(), mode))
    assert (ran.returncode, f"has mode {mode:04o}" in ran.stderr) == (1, True), ran.stderr


def test_a_key_that_others_may_read_or_that_does_not_fit_is_refused(folder: Path) -> None:
    ca = Authority(folder / "pki")
    pair, other = ca.sign("server"), ca.sign("other")
    ran = _start(folder, f"--tls-cert={pair.certificate}", f"--tls-key={other.key}")
    assert (ran.returncode, "are not a PEM certificate with its key" in ran.stderr) == (1, True)
    pair.key.chmod(0o644)
    ran = _start(folder, f"--tls-cert={pair.certificate}", f"--tls-key={pair.key}")
    assert (ran.returncode, "has mode 0644" in ran.stderr) == (1, True)
    ran = _start(folder, f"--tls-cert={folder}/none", f"--tls-key={pair.key}")
    assert ran.returncode == 1


def test_the_pure_python_protobuf_is_refused(folder: Path) -> None:
    ran = _start(
        folder, f"--listen=unix:{folder}/s.sock", PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="python"
    )
    assert ran.returncode == 1
    assert "unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION" in ran.stderr


@pytest.mark.parametrize("listen", ["127.0.0.1:1?role=read", "unix:/x?role=root", "unix:/x?mode=1"])
def test_a_role_that_is_none_is_refused(folder: Path, listen: str) -> None:
    ran = _start(folder, f"--listen={listen}")
    assert (ran.returncode, "only unix:PATH?role=" in ran.stderr) == (2, True), ran.stderr


@pytest.mark.parametrize("optimized", [*_seldom(("",), ("1",)), "2"])
def test_everything_holds_without_assertions(
    folder: Path, optimized: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", optimized)
    secured = Secured(folder).start()
    try:
        channel = secured.channel()
        for path in METHODS:
            assert code_of(channel, path) is grpc.StatusCode.UNAUTHENTICATED
            code = code_of(channel, path, secured.bearer("other"))
            assert code is grpc.StatusCode.PERMISSION_DENIED
        ran = _start(folder, "--listen=0.0.0.0:0", PYTHONOPTIMIZE=optimized)
        assert ran.returncode == 2
    finally:
        assert secured.stop() == 0


def test_a_server_leaves_no_core(folder: Path) -> None:
    secured = Secured(folder).start()
    try:
        process = secured.server.process
        assert process is not None
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        for pid in (process.pid, *(child.pid for child in children)):
            assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)
    finally:
        assert secured.stop() == 0


def test_a_socket_admits_owner_and_group_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        secured = Secured(folder, flags=(f"--listen=unix:{folder}/run/any.sock",)).start()
    finally:
        os.umask(before)
    try:
        for name in ("push", "apply", "read", "admin", "any"):
            assert (folder / "run" / f"{name}.sock").stat().st_mode & 0o777 == 0o660
        # A socket without a role asks for a token, because there is an authority file.
        channel = secured.channel(address=secured.socket("any"))
        assert code_of(channel, STATUS) is grpc.StatusCode.UNAUTHENTICATED
        assert code_of(channel, STATUS, secured.bearer("read")) is grpc.StatusCode.OK
    finally:
        assert secured.stop() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_socket_takes_the_group_of_its_folder(folder: Path) -> None:
    (folder / "run").mkdir()
    os.chown(folder / "run", 0, 12345)
    (folder / "run").chmod(0o2750)
    secured = Secured(folder).start()
    try:
        assert (folder / "run" / "push.sock").stat().st_gid == 12345
    finally:
        assert secured.stop() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect(folder: Path) -> None:
    secured = Secured(folder).start()
    folder.chmod(0o755)
    program = "import socket,sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    try:
        for name in ("push.sock", "segments.sock"):
            path = str(folder / "run" / name)
            mine = subprocess.run([sys.executable, "-c", program, path], check=False)
            other = subprocess.run(
                ["/usr/bin/python3", "-c", program, path],
                check=False,
                user=65534,
                group=65534,
                extra_groups=[],
                capture_output=True,
                text=True,
                cwd="/",
            )
            assert mine.returncode == 0
            assert "PermissionError" in other.stderr, name
    finally:
        assert secured.stop() == 0


def test_a_token_is_nowhere_to_be_found(folder: Path) -> None:
    secured = Secured(folder, flags=("--log-level=DEBUG",)).start()
    try:
        stranger = new_token()
        channel = secured.channel()
        texts = []
        for metadata in (
            *(secured.bearer(name) for name in secured.tokens),
            (("authorization", f"Bearer {stranger}"),),
        ):
            for path in METHODS:
                code_of(channel, path, metadata, b"\xff", timeout_s=2)
            try:
                cast("Any", channel).unary_unary(STATUS)(b"\xff", metadata=metadata, timeout=5)
            except grpc.RpcError as error:
                texts.append(f"{error}")
        secured.write(read=new_token())
        code_of(channel, STATUS, secured.bearer("read"))
        process = secured.server.process
        assert process is not None
        proc = Path(f"/proc/{process.pid}")
        texts += [(proc / "cmdline").read_text(), secured.server.log, secured.file.read_text()]
        texts.append(secured.scrape())
        for token in (*secured.tokens.values(), stranger):
            for text in texts:
                assert token not in text
                assert token[3:20] not in text
    finally:
        assert secured.stop() == 0
