"""vLLM's verbs over HTTP, asked as prime-rl and scripts ask, of a real server process."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import ssl
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.servers import free_port
from tests.support.secured import Secured
from tests.support.weightsync_server import WeightSyncServer
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = pytest.mark.timeout(120)

_INDEX = "model.safetensors.index.json"


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    return {
        "w": torch.full((64, 33), float(seed), dtype=torch.bfloat16),
        "b": torch.arange(5, dtype=torch.float32) + seed,
    }


def _write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a checkpoint as prime-rl does: shards, their index, and STABLE at the end."""
    folder.mkdir(parents=True)
    names = sorted(tensors)
    weight_map = {}
    for at, name in enumerate(names):
        weight_map[name] = f"model-{at + 1:05}-of-{len(names):05}.safetensors"
        save_file({name: tensors[name]}, folder / weight_map[name], metadata={"format": "pt"})
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "STABLE").touch()
    return folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wsh") as name:
        yield Path(name)


def _flags(folder: Path, port: int) -> list[str]:
    model = folder / "model.safetensors"
    save_file(_tensors(1), model)
    (folder / "broadcasts").mkdir()
    return [
        *("--engine=memory", f"--model={model}", "--ranks=2"),
        *(f"--http=127.0.0.1:{port}", f"--import-dir={folder}/broadcasts"),
    ]


class _Site:
    """A server and what asks it.

    Attributes:
        folder: Everything of it.
        http: Sends requests.
        client: Ours, over gRPC.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        port = free_port()
        self.folder = folder
        self.server = WeightSyncServer(
            folder / "run",
            folder / "state",
            store="memory://",
            flags=[*_flags(folder, port), *flags],
        )
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Self:
        self.server.start()
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.client = Client(self.server.address)
        self.server.wait_serving()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.client.close()
        assert self.server.stop() == 0, self.server.log
        assert "Traceback" not in self.server.log, self.server.log

    def step(self, number: int, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
        return _write(self.folder / f"broadcasts/step_{number}", tensors or _tensors(number))

    def post(self, path: object) -> httpx.Response:
        return self.http.post("/update_weights", json={"weight_dir": str(path)})

    def live(self) -> tuple[int, dict[str, torch.Tensor]]:
        (model,) = self.client.status().models
        served = self.client.tensors(model.live_version)
        return model.live_version, {tensor.name: tensor.torch() for tensor in served}


@pytest.fixture(scope="module")
def shared_site() -> Iterator[_Site]:
    with tempfile.TemporaryDirectory(prefix="wsh") as name, _Site(Path(name)) as made:
        yield made


@pytest.fixture
def site(shared_site: _Site) -> Iterator[_Site]:
    """A server that serves whatever other tests have left; each takes steps of its own."""
    yield shared_site
    for push in shared_site.client.status().models[0].pushes:
        shared_site.client.abort(push.push_id)
    shared_site.http.post("/resume")


def _equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def test_a_folder_is_cast_to_what_the_engine_has(site: _Site) -> None:
    given = {"w": torch.randn(64, 33), "b": (torch.arange(5) + 0.3).double()}
    reply = site.post(site.step(40, given))
    assert reply.json()["cast"] == 2, reply.text
    served = {"w": given["w"].bfloat16(), "b": given["b"].float()}
    assert _equal(site.live()[1], served)
    assert site.client.verify().verified
    # One of two files.
    parted = site.folder / "broadcasts/step_41"
    parted.mkdir()
    save_file({"w": given["w"]}, parted / "a.safetensors")
    save_file({"b": torch.ones(5)}, parted / "b.safetensors")
    assert site.post(parted).json()["cast"] == 1
    assert _equal(site.live()[1], {"w": served["w"], "b": torch.ones(5)})
    given["b"][2] = 1e39
    reply = site.post(site.step(42, given))
    assert reply.status_code == 400
    assert "write tensor 'b' with values within the range of F32" in reply.text
    assert "element 2 is 1e+39" in reply.text
    assert "cast" not in site.post(site.step(43, served)).json()


async def _as_prime_rl(url: str, weight_dir: Path, headers: Mapping[str, str]) -> list[Any]:
    """Ask what prime-rl's orchestrator asks of an `admin_base_url` at each step."""
    replies = []
    timeout = httpx.Timeout(None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout) as client:
        (await client.get("/health")).raise_for_status()
        params = {"mode": "keep", "clear_cache": "false"}
        replies.append(await client.post("/pause", params=params))
        # Another backend's marker, which it leaves in the folder for this one, too.
        (weight_dir / "NCCL_READY").touch()
        try:
            body = {"weight_dir": weight_dir.as_posix()}
            replies.append(await client.post("/update_weights", json=body))
        finally:
            replies.append(await client.post("/resume"))
    return [reply.raise_for_status().json() for reply in replies]


def test_the_sequence_of_prime_rl(site: _Site) -> None:
    live, versions = site.live()[0], []
    for number in (2, 3):
        weight_dir = site.step(number)
        paused, updated, resumed = asyncio.run(_as_prime_rl(site.url, weight_dir, {}))
        assert paused["status"] == "deferred"
        assert updated["status"] == "ok"
        assert updated["previous_version"] == live < updated["version"]
        assert updated["pause_mode"] == "keep"
        assert resumed["status"] == "resumed"
        live, served = site.live()
        assert live == updated["version"]
        versions.append(live)
        assert _equal(served, _tensors(number))
        proof = site.client.verify()
        assert proof.verified
        assert proof.content_digest == updated["content_digest"]
    assert site.client.rollback().report.version == versions[0]


def test_a_folder_without_index_and_a_large_shard(folder: Path) -> None:
    made = _Site(folder)
    # More than one block, and of a size that no block divides.
    big = torch.arange(9_000_001, dtype=torch.float32)
    save_file({"w": big}, folder / "model.safetensors")
    with made as site:
        weight_dir = folder / "broadcasts/a/b/c"
        weight_dir.mkdir(parents=True)
        save_file({"w": big + 1}, weight_dir / "model.safetensors")
        reply = site.post(weight_dir)
        assert reply.status_code == 200, reply.text
        _, served = site.live()
        assert torch.equal(served["w"], big + 1)


def test_the_index_settles_a_stale_copy(site: _Site) -> None:
    folder, tensors = site.step(301), _tensors(301)
    named = {"w": folder / "model-00002-of-00002.safetensors"}
    stale = {"b": tensors["b"] - 1}
    save_file({**stale, "w": tensors["w"]}, named["w"])
    reply = site.post(folder)
    assert reply.status_code == 200, reply.text
    assert _equal(site.live()[1], tensors)
    assert site.client.verify().verified
    (folder / _INDEX).unlink()
    refused = site.post(folder)
    assert refused.status_code == 400
    assert "twice, in" in refused.text


def _cut(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)


def _cut_header(folder: Path) -> None:
    os.truncate(folder / "model-00001-of-00002.safetensors", 20)


def _lose_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def _lose_all(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    (folder / _INDEX).unlink()


def _swap(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))
    first.write_bytes(second.read_bytes())


def _climb(folder: Path) -> None:
    (folder / _INDEX).write_text('{"weight_map": {"w": "../damaged/model-00001-of-00002"}}')


def _no_index(folder: Path) -> None:
    (folder / _INDEX).write_text("[" * 100_000)


def _link(folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    shard.rename(folder.parent.parent / f"{folder.name}.safetensors")
    shard.symlink_to(folder.parent.parent / f"{folder.name}.safetensors")


def _link_index(folder: Path) -> None:
    index = folder / _INDEX
    index.rename(folder.parent.parent / f"{folder.name}.json")
    index.symlink_to(folder.parent.parent / f"{folder.name}.json")


def _fifo(folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    shard.unlink()
    os.mkfifo(shard)


def _other_shape(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    save_file({"w": torch.zeros(1, dtype=torch.bfloat16)}, shard)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_cut, "the file was cut short; copy it again"),
        (_cut_header, "is not a safetensors file"),
        (_lose_shard, "does not exist here"),
        (_lose_all, "give the folder that holds the .safetensors files"),
        (_swap, 'places "b" in'),
        (_climb, "not an index of safetensors files"),
        (_no_index, "not an index of safetensors files"),
        (_link, "links are not followed"),
        (_link_index, "links are not followed"),
        (_fifo, "not a regular file"),
        (_other_shape, "the engine has"),
    ],
)
def test_a_damaged_folder_is_one_sentence_and_changes_nothing(
    site: _Site, damage: Any, sentence: str
) -> None:
    before = site.client.status().models[0].live_content_digest
    name = f"damaged{damage.__name__}"
    weight_dir = _write(site.folder / "broadcasts" / name, _tensors(3))
    damage(weight_dir)
    reply = site.post(weight_dir)
    assert 400 <= reply.status_code < 500, reply.text
    assert sentence in reply.json()["error"]
    assert site.client.status().models[0].live_content_digest == before
    assert not site.client.status().models[0].pushes
    assert site.client.verify().verified


def test_tensors_of_another_model_are_refused(site: _Site) -> None:
    live = site.live()[0]
    reply = site.post(site.step(4, {"other": torch.zeros(3), "b": _tensors(2)["b"]}))
    assert reply.status_code == 409
    assert "other" in reply.json()["error"]
    assert site.live()[0] == live


def _occupy(site: _Site) -> str:
    """Take the one free slot, so that the begin of the next push waits; returns the push."""
    request = pb.BeginPushRequest(model="default", total_bytes=100)
    return str(site.server.stub.BeginPush(request, timeout=10).push_id)


def _wait_for_pushes(site: _Site, count: int) -> None:
    end = time.monotonic() + 30
    while len(site.client.status().models[0].pushes) != count:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_one_folder_at_a_time_and_the_same_one_joins(site: _Site) -> None:
    first, other = site.step(5), site.step(6)
    push_id = _occupy(site)
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(site.post, first)
        _wait_for_pushes(site, 2)
        refused = site.post(other)
        assert refused.status_code == 409
        assert refused.json()["reason"] == "APPLY_BUSY"
        assert refused.headers["retry-after"] == "1"
        joined = pool.submit(site.post, first)
        site.server.stub.AbortPush(pb.AbortPushRequest(push_id=push_id), timeout=10)
        assert begun.result().status_code == 200, begun.result().text
        if joined.result().json() != begun.result().json():
            # It came when the first had ended, and is an update of its own.
            assert joined.result().json()["version"] == begun.result().json()["version"] + 1
    assert site.post(other).status_code == 200
    assert _equal(site.live()[1], _tensors(6))


def test_a_folder_that_was_written_again_does_not_join(site: _Site) -> None:
    folder = site.step(7)
    push_id = _occupy(site)
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(site.post, folder)
        _wait_for_pushes(site, 2)
        for file in folder.glob("*.safetensors"):
            os.utime(file)
        again = site.post(folder)
        assert again.status_code == 409
        assert "changed after the running update read it" in again.json()["error"]
        site.server.stub.AbortPush(pb.AbortPushRequest(push_id=push_id), timeout=10)
        begun.result()


def test_who_leaves_changes_nothing(site: _Site) -> None:
    push_id = _occupy(site)
    weight_dir, timeout = site.step(8), httpx.Timeout(30, read=1)
    with pytest.raises(httpx.ReadTimeout):
        site.http.post("/update_weights", json={"weight_dir": str(weight_dir)}, timeout=timeout)
    _wait_for_pushes(site, 2)
    site.server.stub.AbortPush(pb.AbortPushRequest(push_id=push_id), timeout=10)
    end = time.monotonic() + 30
    while not _equal(site.live()[1], _tensors(8)):
        assert time.monotonic() < end
        time.sleep(0.05)


#: Senders that may wait for one update.
_WAITING = 64


def test_senders_who_left_an_update_hold_nothing_and_it_goes_on(site: _Site) -> None:
    push_id, step = _occupy(site), site.step(21)
    assert site.server.process is not None
    server = psutil.Process(site.server.process.pid)
    before, threads = site.client.status().models[0].live_version, server.num_threads()
    begun = set[str]()
    for _ in range(5):
        senders = _all_that_may_wait(site, step)
        _wait_for_pushes(site, 2)
        begun = begun or _open_pushes(site)
        for sender in senders:
            sender.close()
        _wait_for_none(server, site.url)
        # It is the update of the first, and nobody's now.
        assert _open_pushes(site) == begun
        assert server.num_threads() < threads + _WAITING
    staying = _all_that_may_wait(site, step)
    assert site.post(site.step(22)).status_code == 503
    assert site.http.get("/is_paused").json() == {"is_paused": False}
    assert site.http.get("/health").status_code == 200
    site.server.stub.AbortPush(pb.AbortPushRequest(push_id=push_id), timeout=10)
    (answer,) = set(map(_read, staying))
    done = json.loads(answer.rpartition(b"\r\n\r\n")[2])
    assert (done["previous_version"], done["version"]) == (before, site.live()[0])
    assert _equal(site.live()[1], _tensors(21))
    assert not _open_pushes(site)


def _all_that_may_wait(site: _Site, weight_dir: Path) -> list[socket.socket]:
    """Post a folder until one more is refused; return the connections of those who wait."""
    senders = [_send(site, weight_dir) for _ in range(_WAITING + 1)]
    ((refused,), *_) = select.select(senders, [], [], 30)
    answer = _read(refused)
    assert answer.split()[1] == b"503", answer
    assert b"LIMIT_EXCEEDED" in answer
    senders.remove(refused)
    return senders


def _read(connection: socket.socket) -> bytes:
    with connection, connection.makefile("rb") as answer:
        return answer.read()


def _open_pushes(site: _Site) -> set[str]:
    return {push.push_id for push in site.client.status().models[0].pushes}


def _send(site: _Site, weight_dir: Path) -> socket.socket:
    """Post a folder; return the connection, whose answer is to come."""
    content = json.dumps({"weight_dir": str(weight_dir)})
    head = f"POST /update_weights HTTP/1.1\r\nHost: h\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", int(site.url.rpartition(":")[2])), 30)
    connection.sendall((head + content).encode())
    return connection


def _wait_for_none(server: psutil.Process, url: str) -> None:
    """Return when the server holds no connection of the HTTP API."""
    port = int(url.rpartition(":")[2])
    end = time.monotonic() + 30
    while any(
        one.laddr.port == port and one.status != "LISTEN" for one in server.net_connections("tcp")
    ):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_push_of_somebody_else_goes_on_meanwhile(site: _Site) -> None:
    pushed = site.client.push(_tensors(19))
    updated = site.post(site.step(9)).json()
    assert updated["version"] == pushed.version + 1
    assert site.client.push(_tensors(20)).version == updated["version"] + 1


def test_a_stop_ends_an_update_that_waits(folder: Path) -> None:
    with _Site(folder, "--drain-timeout-s=1") as site, ThreadPoolExecutor() as pool:
        _occupy(site)
        waiting = pool.submit(site.post, site.step(2))
        _wait_for_pushes(site, 2)
        site.server.close_channels()
        process = site.server.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        assert waiting.result(60).status_code == 503
        assert waiting.result().json()["reason"] == "SHUTTING_DOWN"
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("mode", "clear", "pause", "step"),
    [
        ("keep", "false", ("keep", "keep"), 10),
        ("abort", "true", ("abort", "recompute"), 12),
        ("wait", "1", ("wait", "recompute"), 14),
    ],
)
def test_a_pause_says_how_the_update_stops_generation(
    site: _Site, mode: str, clear: str, pause: tuple[str, str], step: int
) -> None:
    params = {"mode": mode, "clear_cache": clear, "timeout_s": "30"}
    kept = site.http.post("/pause", params=params).json()
    assert (kept["timeout_s"], kept["is_paused"]) == (30.0, False)
    assert site.http.get("/is_paused").json() == {"is_paused": False}
    assert site.http.get("/health").json() == {"status": "serving"}
    updated = site.post(site.step(step)).json()
    assert (updated["pause_mode"], updated["cache"]) == pause
    for _ in range(2):
        assert site.http.post("/resume").json()["status"] == "resumed"
    updated = site.post(site.step(step + 1)).json()
    assert (updated["pause_mode"], updated["cache"]) == ("keep", "recompute")


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/update_weights", b"", 405),
        ("POST", "/health", b"", 405),
        ("PUT", "/pause", b"", 405),
        ("GET", "/page", b"", 404),
        ("POST", "/update_weights/", b"", 404),
        ("POST", "/init_weight_transfer_engine", b"{}", 404),
        ("POST", "/update_weights", b"", 400),
        ("POST", "/update_weights", b"{", 400),
        ("POST", "/update_weights", b"[]", 400),
        ("POST", "/update_weights", b"\xff", 400),
        ("POST", "/update_weights", b"[" * 60_000, 400),
        ("POST", "/update_weights", b'{"weight_dir": null}', 400),
        ("POST", "/update_weights", b'{"weight_dir": 7}', 400),
        ("POST", "/update_weights", b'{"update_info": {"names": []}}', 400),
        ("POST", "/update_weights", b'{"weight_dir": "/etc"}', 400),
        ("POST", "/update_weights", b" " * 70_000, 413),
        ("POST", "/pause?mode=stop", b"", 400),
        ("POST", "/pause?mode", b"", 400),
        ("POST", "/pause?timeout_s=1e9", b"", 400),
        ("POST", "/pause?wait=1", b"", 400),
        ("POST", "/resume?mode=keep", b"", 400),
    ],
)
def test_what_is_wrong_is_one_sentence(
    site: _Site, method: str, path: str, content: bytes, status: int
) -> None:
    reply = site.http.request(
        method, httpx.URL(site.url).copy_with(raw_path=path.encode()), content=content
    )
    assert reply.status_code == status
    assert set(reply.json()) == {"error", "reason"}
    if status == 405:
        assert reply.headers["allow"] in ("GET", "POST")
    assert site.http.head("/health").status_code == 200
    assert not site.client.status().models[0].pushes


def test_a_page_in_a_browser_is_not_answered(site: _Site) -> None:
    before = site.client.status().models[0].live_version
    weight_dir = _write(site.folder / "broadcasts/page", _tensors(2))
    body = json.dumps({"weight_dir": str(weight_dir)})
    headers = {"Origin": "https://example.org", "Content-Type": "text/plain"}
    reply = site.http.post("/update_weights", content=body, headers=headers)
    assert reply.status_code == 403
    assert site.live()[0] == before


def test_health_tells_why_not(folder: Path) -> None:
    port = free_port()
    # No engine is there at all.
    server = WeightSyncServer(
        folder / "run", folder / "state", store="memory://", flags=[f"--http=127.0.0.1:{port}"]
    ).start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            reply = client.get("/health")
            assert reply.status_code == 503
            assert "vLLM does not answer" in reply.json()["error"]
            assert client.get("/is_paused").json() == {"is_paused": True}
            reply = client.post("/update_weights", json={"weight_dir": "/x/y"})
            assert reply.status_code == 400
            assert "--import-dir" in reply.json()["error"]
    finally:
        assert server.stop() == 0


def test_a_port_that_is_taken_ends_the_start(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = WeightSyncServer(
            folder / "run", folder / "state", flags=[f"--http=127.0.0.1:{port}"]
        )
        with pytest.raises(RuntimeError, match=f"127.0.0.1:{port} is in use, .* with --http"):
            server.start()


def test_without_the_flag_nothing_listens(folder: Path) -> None:
    server = WeightSyncServer(folder / "run", folder / "state", store="memory://").start()
    try:
        process = psutil.Process(server.process.pid if server.process else 0)
        ports = [one.laddr.port for one in process.net_connections("tcp") if one.status == "LISTEN"]
        assert len(ports) == 1, "the metrics"
    finally:
        assert server.stop() == 0


def _read_back(secured: Secured) -> dict[str, torch.Tensor]:
    with Client(secured.socket("admin")) as client:
        (model,) = client.status().models
        return {t.name: t.torch() for t in client.tensors(model.live_version)}


def test_a_certificate_proves_who_asks_and_is_read_again(folder: Path) -> None:
    port = free_port()
    secured = Secured(folder, tls=True, mutual=True, flags=_flags(folder, port)).start()
    try:
        trust = ssl.create_default_context(cafile=str(secured.ca.ca))

        def serial() -> str:
            with (
                socket.create_connection(("127.0.0.1", port)) as plain,
                trust.wrap_socket(plain, server_hostname="localhost") as connection,
            ):
                certificate: Any = connection.getpeercert()
                return str(certificate["serialNumber"])

        def ask(name: str, path: str) -> int:
            pair = secured.ca.sign("whoever", f"{name}.test", file=f"leaf-{name}")
            context = ssl.create_default_context(cafile=str(secured.ca.ca))
            context.load_cert_chain(pair.certificate, pair.key)
            url = f"https://localhost:{port}"
            with httpx.Client(base_url=url, verify=context, timeout=30) as client:
                return client.post(path).status_code

        assert ask("apply", "/pause") == 200
        assert ask("push", "/pause") == 403
        assert ask("stranger", "/pause") == 401
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"https://localhost:{port}/health", verify=trust, timeout=10)
        before = serial()
        secured.ca.sign("renewed", "localhost", file="renewed").move_to(secured.pair)
        assert serial() != before
        assert ask("apply", "/pause") == 200
    finally:
        assert secured.stop() == 0


def test_who_may_do_what_over_tls(folder: Path) -> None:
    port = free_port()
    flags = [flag.replace("127.0.0.1", "0.0.0.0") for flag in _flags(folder, port)]
    secured = Secured(folder, tls=True, flags=flags).start()
    try:
        secured.server.wait_serving()
        trust = ssl.create_default_context(cafile=str(secured.ca.ca))
        url = f"https://localhost:{port}"
        weight_dir = _write(folder / "broadcasts/step_2", _tensors(2))
        body = {"weight_dir": str(weight_dir)}

        def ask(name: str, method: str, path: str, **more: Any) -> httpx.Response:
            token = secured.tokens.get(name, name)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            with httpx.Client(base_url=url, verify=trust, headers=headers, timeout=30) as client:
                return client.request(method, path, **more)

        for name in ("", "ws_wrong"):
            for path in ("/health", "/pause", "/update_weights", "/elsewhere"):
                reply = ask(name, "POST", path, json=body)
                assert reply.status_code == 401
                assert reply.json()["reason"] == "UNAUTHENTICATED"
        # Half of what it takes is not enough, and does not push.
        for name in ("push", "apply", "read", "other"):
            assert ask(name, "POST", "/update_weights", json=body).status_code == 403
        for name in ("push", "read", "other"):
            assert ask(name, "POST", "/pause").status_code == 403
            assert ask(name, "POST", "/resume").status_code == 403
        assert ask("apply", "POST", "/pause").status_code == 200
        for name in ("push", "apply", "read", "admin"):
            assert ask(name, "GET", "/health").status_code == 200
        assert not [line for line in secured.audit() if line["method"] != "GetStatus"]
        assert {line["method"] for line in secured.refusals()} >= {"update_weights", "pause"}
        reply = ask("admin", "POST", "/update_weights", json=body)
        assert reply.status_code == 200, reply.text
        lines = [(line["method"], line["who"], line["outcome"]) for line in secured.audit()]
        methods = ("BeginPush", "PushWeights", "ApplyVersion")
        assert lines == [(method, "admin", "OK") for method in methods]
        assert reply.json()["version"] == secured.server.wait_serving().live_version
        assert secured.metric("weightsync_state_calls_total") == secured.metric(
            "weightsync_audit_lines_total"
        )
        assert _equal(_read_back(secured), _tensors(2))
        # In plain text nobody is answered.
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{port}/health", timeout=10)
    finally:
        assert secured.stop() == 0
