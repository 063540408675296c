"""Our own client and command against a server that asks who calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.secured import Secured
from weightsync.errors import Reason
from weightsync_client import Access, AsyncClient, Client, ClientError, DeniedError, Retry
from weightsync_server.auth.principals import new_token

ARRAYS = {"a": np.arange(1024, dtype=np.float32), "b": np.zeros((3, 5), dtype=np.float16)}


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    folder = Path(tempfile.mkdtemp(prefix="wsc"))
    secured = Secured(folder, tls=True, mutual=True).start()
    yield secured
    assert secured.stop() == 0
    shutil.rmtree(folder)


def _access(secured: Secured, name: str = "", token: str = "") -> Access:
    pair = secured.ca.sign("client", *([f"{name}.test"] if name else []), file=f"client-{name}")
    return Access(tls_ca=secured.ca.ca, tls_cert=pair.certificate, tls_key=pair.key, token=token)


def _client(secured: Secured, access: Access) -> Client:
    return Client(secured.address, access=access, retry=Retry(attempts=1))


@pytest.mark.parametrize("proof", ["certificate", "token"])
def test_each_role_does_its_part(secured: Secured, proof: str) -> None:
    def access(role: str) -> Access:
        if proof == "certificate":
            return _access(secured, role)
        return _access(secured, token=secured.tokens[role])

    with _client(secured, access("push")) as trainer:
        version = trainer.push(ARRAYS, streams=2).version
        with pytest.raises(DeniedError) as caught:
            list(trainer.tensors(version))
        assert caught.value.reason is Reason.PERMISSION_DENIED
        with pytest.raises(DeniedError, match="it takes role admin or apply"):
            trainer.apply(version)
    with _client(secured, access("read")) as reader:
        pulled = {tensor.name: tensor for tensor in reader.tensors(version)}
        assert set(pulled) == set(ARRAYS)
        with pytest.raises(DeniedError):
            reader.push(ARRAYS)
        with pytest.raises(DeniedError):
            reader.delete(version)
    with _client(secured, access("admin")) as admin:
        admin.delete(version)
        assert admin.health("push")


async def test_the_client_for_asyncio_does_the_same(secured: Secured) -> None:
    access = _access(secured, token=secured.tokens["push"])
    async with AsyncClient(secured.address, access=access) as client:
        pushed = await client.push(ARRAYS)
        assert (await client.versions())[0].version == pushed.version
        with pytest.raises(DeniedError):
            await client.rollback()


def test_the_command_reads_the_environment(secured: Secured) -> None:
    access = _access(secured)
    token = secured.folder / "client.token"
    token.write_text(secured.tokens["read"])
    token.chmod(0o600)
    variables = os.environ | {
        "WEIGHTSYNC_ADDRESS": secured.address,
        "WEIGHTSYNC_TOKEN_FILE": str(token),
        "WEIGHTSYNC_TLS_CA": str(access.tls_ca),
        "WEIGHTSYNC_TLS_CERT": str(access.tls_cert),
        "WEIGHTSYNC_TLS_KEY": str(access.tls_key),
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "weightsync_client.cli", *arguments]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=50, env=variables
        )

    assert run("status").returncode == 0
    denied = run("rollback")
    assert (denied.returncode, "read may not call" in denied.stderr) == (9, True)
    assert "`weightsync rollback`" in denied.stderr
    del variables["WEIGHTSYNC_TOKEN_FILE"]
    nobody = run("status")
    assert (nobody.returncode, "with one token" in nobody.stderr) == (9, True)
    assert "WEIGHTSYNC_TOKEN or WEIGHTSYNC_TOKEN_FILE" in nobody.stderr
    variables["WEIGHTSYNC_TLS_CERT"] = ""
    assert "go together" in run("status").stderr


def test_a_server_that_is_somebody_else_is_not_spoken_to(secured: Secured, tmp_path: Path) -> None:
    other = Secured(tmp_path / "other", tls=True)
    access = Access(tls_ca=other.ca.ca, token=secured.tokens["admin"])
    with (
        _client(secured, access) as client,
        pytest.raises(ClientError, match="do not agree on TLS") as caught,
    ):
        client.status()
    assert secured.tokens["admin"] not in str(caught.value)


def test_a_token_is_replaced_while_the_client_runs(secured: Secured) -> None:
    token = secured.folder / "rotated.token"
    token.write_text(secured.tokens["apply"])
    token.chmod(0o600)
    certificate = _access(secured)
    access = Access(
        tls_ca=certificate.tls_ca,
        tls_cert=certificate.tls_cert,
        tls_key=certificate.tls_key,
        token_file=token,
    )
    with _client(secured, access) as client:
        client.status()
        secured.write(apply=new_token())
        with pytest.raises(DeniedError):
            client.status()
        token.write_text(secured.tokens["apply"])
        client.status()
