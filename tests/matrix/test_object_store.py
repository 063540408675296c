"""Servers whose versions lie in a bucket: what one of them commits, another one serves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from tests.support.object_proxy import Fault, object_proxy
from tests.support.object_servers import ObjectServer, s3rver
from tests.support.serving import wait_serving
from weightsync import failpoints
from weightsync_client import Client, ClientError, PushKind, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = pytest.mark.timeout(180)

_START_S = 60.0
_COMMAND = Path(sys.executable).with_name("weightsync-server")


def _tensors(seed: int, size: int = 4) -> dict[str, torch.Tensor]:
    return {
        "w": torch.full((8, size), float(seed), dtype=torch.bfloat16),
        "b": torch.zeros(3) + seed,
    }


@contextlib.contextmanager
def _served(
    folder: Path,
    store: str,
    bucket: ObjectServer,
    *,
    port: int = 0,
    size: int = 4,
    faults: str = "",
) -> Iterator[Client]:
    """Run a server with a state of its own in `folder`; it is killed at the end."""
    folder.mkdir(exist_ok=True)
    model = folder / "model.safetensors"
    if not model.exists():
        save_file(_tensors(1, size), model)
    flags = [
        *("--engine", "memory", "--model", str(model), "--ranks", "2", "--store", store),
        *("--listen", f"unix:{folder}/server.sock", "--run-dir", f"{folder}/run"),
        *("--state-dir", f"{folder}/state", "--metrics", "", "--no-same-host"),
    ]
    environment = os.environ | bucket.environment(port)
    if faults:
        environment |= {failpoints.VARIABLE: faults}
    server = subprocess.Popen([_COMMAND, *flags], env=environment)
    try:
        with Client(f"unix:{folder}/server.sock") as client:
            wait_serving(server, client, _START_S)
            yield client
    finally:
        server.kill()
        server.wait()


def _pulled(client: Client, version: int) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.torch().clone() for tensor in client.tensors(version)}


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    same = found.keys() == expected.keys()
    return same and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_new_server_serves_what_another_one_committed(folder: Path, bucket: ObjectServer) -> None:
    store = f"{bucket.url}/{folder.name}"
    with _served(folder / "a", store, bucket) as client:
        assert client.acquire_epoch() == 1
        first = client.push(_tensors(2))
        assert first.durable
        changed = _tensors(2)
        changed["w"][0, 0] = 5
        second = client.push(changed)
        client.apply(second.version)
        committed = client.versions()
    # Another host: nothing of the first one's state is there.
    with _served(folder / "b", store, bucket) as client:
        there = {version.version: version for version in client.versions()}
        for version in committed:
            assert there[version.version].content_digest == version.content_digest
        assert _equal(_pulled(client, first.version), _tensors(2))
        assert _equal(_pulled(client, second.version), changed)
        for pushed in (first, second):
            client.apply(pushed.version)
            proof = client.verify()
            assert proof.verified
            assert proof.content_digest == pushed.content_digest
        assert client.acquire_epoch() == 2
        third = client.push(_tensors(4))
        assert third.version == second.version + 1


def test_deltas_and_retention_work_in_a_bucket(folder: Path, bucket: ObjectServer) -> None:
    store = f"{bucket.url}/{folder.name}"
    torch.manual_seed(0)
    tensors = {"w": torch.randn(256, 4096).to(torch.bfloat16), "b": torch.zeros(3)}
    folder.mkdir(exist_ok=True)
    (folder / "a").mkdir()
    save_file(tensors, folder / "a" / "model.safetensors")
    with _served(folder / "a", store, bucket) as client:
        client.acquire_epoch()
        kinds = []
        for step in range(14):
            tensors["w"][step, :40] += 1
            kinds.append(client.push(tensors, delta="auto").kind)
        newest = client.versions()[0]
    assert kinds.count(PushKind.DELTA) > 5
    (folder / "b").mkdir()
    save_file(_tensors(1), folder / "b" / "model.safetensors")
    with _served(folder / "b", store, bucket) as client:
        assert _equal(_pulled(client, newest.version), tensors)


def test_a_trainer_fails_over_to_another_server(folder: Path, bucket: ObjectServer) -> None:
    store = f"{bucket.url}/{folder.name}"
    with (
        _served(folder / "a", store, bucket) as first,
        _served(folder / "b", store, bucket) as second,
    ):
        epoch = first.acquire_epoch()
        one = first.push(_tensors(2), epoch=epoch)
        taken = second.acquire_epoch()
        assert taken == epoch + 1
        assert [v.version for v in second.versions()] == [v.version for v in first.versions()]
        with pytest.raises(RefusedError, match="epoch"):
            first.push(_tensors(3), epoch=epoch)
        two = second.push(_tensors(3), epoch=taken)
        assert two.version > one.version
        assert _equal(_pulled(second, one.version), _tensors(2))


def test_a_push_goes_on_after_a_crash_with_the_shards_that_were_whole(
    folder: Path, bucket: ObjectServer
) -> None:
    store = f"{bucket.url}/{folder.name}"
    tensors = {f"t{number}": torch.full((1 << 20,), float(number)) for number in range(6)}
    (folder / "a").mkdir()
    save_file({name: torch.zeros(1 << 20) for name in tensors}, folder / "a/model.safetensors")
    with ThreadPoolExecutor(1) as threads:
        with _served(folder / "a", store, bucket, faults="commit.store=1>1*panic") as client:
            push = threads.submit(
                Client(f"unix:{folder}/a/server.sock").push, tensors, shard_bytes=8 << 20
            )
            end = time.monotonic() + _START_S
            while True:
                try:
                    client.status()
                except ClientError:
                    break
                assert time.monotonic() < end
                time.sleep(0.1)
        with _served(folder / "a", store, bucket) as client:
            done = push.result(_START_S)
            # What was whole was not sent again.
            assert done.sent_bytes < 1.1 * done.size_bytes
            assert _equal(_pulled(client, done.version), tensors)


def test_a_server_survives_a_store_that_throttles(folder: Path, bucket: ObjectServer) -> None:
    store = f"{bucket.url}/{folder.name}"
    with object_proxy(bucket.port) as proxy:
        proxy.fault = lambda number, _method, _path: (
            Fault.THROTTLE if number % 3 == 1 else Fault.NONE
        )
        with _served(folder / "a", store, bucket, port=proxy.port, size=1 << 20) as client:
            pushed = client.push(_tensors(2, 1 << 20))
            client.apply(pushed.version)
        assert proxy.met[Fault.THROTTLE] > 10
    with _served(folder / "b", store, bucket, size=1 << 20) as client:
        assert _equal(_pulled(client, pushed.version), _tensors(2, 1 << 20))


def test_a_store_that_is_not_there_is_one_sentence(folder: Path, bucket: ObjectServer) -> None:
    said = _refusal(folder, "s3://nobody-made-this/x", bucket.environment())
    assert said.startswith("weightsync-server: ")


def test_a_store_that_overwrites_is_refused_at_start(folder: Path, tmp_path: Path) -> None:
    with s3rver(tmp_path) as server:
        said = _refusal(folder, f"{server.url}/x", server.environment())
    assert "wrote over an object although it was asked to create it" in said
    assert "use a store that keeps this promise" in said


def test_an_address_without_a_scheme_is_refused_at_start(
    folder: Path, bucket: ObjectServer
) -> None:
    address = f"127.0.0.1:{bucket.port}"
    said = _refusal(folder, bucket.url, {**bucket.environment(), "AWS_ENDPOINT_URL": address})
    assert "AWS_ENDPOINT_URL is not the address of an object store; write http://" in said


def _refusal(folder: Path, store: str, environment: Mapping[str, str]) -> str:
    """Start a server that refuses a store; return the last line that it says."""
    flags = ["--store", store, "--state-dir", f"{folder}/s", "--metrics", ""]
    flags += ["--listen", f"unix:{folder}/l.sock", "--run-dir", f"{folder}/r"]
    done = subprocess.run(
        [_COMMAND, "--engine", f"unix:{folder}/e.sock", *flags],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "panicked" not in done.stderr
    return done.stderr.splitlines()[-1]
