"""The stream of the status page: to whom, what, how often, how many, and until when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.secured import authority_text
from weightsync.errors import EXPLANATIONS
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc as pb_grpc
from weightsync_server import app as app_module
from weightsync_server.app import App
from weightsync_server.auth.principals import new_token, token_hash
from weightsync_server.flags import Flags
from weightsync_server.http import status_page
from weightsync_server.http.http_app import HttpApi
from weightsync_server.http.read_verbs import plain_document
from weightsync_server.http.status_page import EVENTS, StatusPage
from weightsync_server.status import StatusSource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_FILES = ("/", "/page.css", "/page.js")


class Site:
    """A server in this process; `looks` counts how often its status was read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, kind: str = "") -> None:
        self.looks = 0
        self.tokens = {role: new_token() for role in ("read", "push", "member")}
        self._authority = folder / "authority.toml"
        self._authority.touch(mode=0o600)
        self.write()
        self.pages: list[StatusPage] = []
        self._doors: list[HttpApi] = []
        self.address = f"unix:{folder}/server.sock"
        values: dict[str, Any] = {
            "engine": ["none"],
            "listen": [self.address],
            "authority": None if kind.startswith("open to all") else self._authority,
            "host_names": ["weights.test"] if kind.endswith("with a name") else [],
            "run_dir": folder,
            "state_dir": folder / "state",
            "store": "memory://",
            "metrics": "",
            "http": "127.0.0.1:0",
            "same_host": False,
            "fetchers": 1,
        }
        if kind == "member":
            model = folder / "model.safetensors"
            save_file({"w": np.zeros(4, np.float32)}, model)
            values |= {"engine": ["memory"], "model": str(model)}
            values |= {"fleet": "f", "fleet_member": "a", "fleet_register": folder.as_uri()}
        self.app = App(Flags(**values).tree)
        make, open_door, look = StatusPage.__init__, HttpApi.__init__, StatusSource.__call__

        def made(page: StatusPage, *args: Any) -> None:
            make(page, *args)
            self.pages.append(page)

        def opened(door: HttpApi, *args: Any) -> None:
            open_door(door, *args)
            self._doors.append(door)

        def looked(source: StatusSource) -> pb.GetStatusResponse:
            self.looks += 1
            return look(source)

        monkeypatch.setattr(StatusPage, "__init__", made)
        monkeypatch.setattr(HttpApi, "__init__", opened)
        monkeypatch.setattr(StatusSource, "__call__", looked)

    def write(self, *without: str) -> None:
        """Write the authority file, without some of its principals."""
        principals = [
            {"name": role, "roles": [role], "models": ["default"], "tokens": [token_hash(token)]}
            for role, token in self.tokens.items()
            if role not in without
        ]
        self._authority.write_text(authority_text(principals))

    @property
    def page(self) -> StatusPage:
        return self.pages[0]

    @property
    def url(self) -> str:
        return self._doors[0].url

    async def left(self) -> None:
        """Return when no page follows any more."""
        async with asyncio.timeout(30):
            while self.page._followers:  # noqa: ASYNC110 - the page says so to nobody
                await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def get(
        self, path: str, role: str = "", method: str = "GET", **headers: str
    ) -> AsyncIterator[httpx.Response]:
        if role:
            headers["authorization"] = f"Bearer {self.tokens[role]}"
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False) as client,
            client.stream(method, path, headers=headers) as answer,
        ):
            yield answer

    @contextlib.asynccontextmanager
    async def events(self, role: str = "read") -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
        """Open the stream, and yield its events as they come."""
        async with self.get(EVENTS, role) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/event-stream"
            assert answer.headers["x-accel-buffering"] == "no", "else a proxy keeps what comes"
            yield _events(answer)


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in answer.aiter_lines():
        if line == ":":
            yield "", None
        elif line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line:
            yield name, json.loads(line.removeprefix("data: "))


async def _until(events: AsyncIterator[tuple[str, Any]], name: str) -> Any:
    """Return the next event of a name."""
    async for found, document in events:
        if found == name:
            return document
    raise AssertionError(f"the stream has ended without {name}")


@pytest.fixture
async def site(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Site]:
    # It would change the collector and the limits of the process that runs the tests.
    monkeypatch.setattr(app_module, "tune_process", lambda: None)
    monkeypatch.setattr(status_page, "_LOOK_S", 0.05)
    with tempfile.TemporaryDirectory(prefix="wsh") as name:
        site = Site(Path(name), monkeypatch, kind=getattr(request, "param", ""))
        await site.app.start()
        try:
            yield site
        finally:
            await site.app.stop(0)


@pytest.mark.parametrize("path", _FILES)
async def test_files_are_anyones_and_have_a_strict_policy(site: Site, path: str) -> None:
    async with site.get(path) as answer:
        text = (await answer.aread()).decode()
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    # Nothing of another host, nothing that the policy would keep from running, and no markup made
    # of text.
    code = text.replace("there is no innerHTML here", "")
    for wrong in ("://", "innerHTML", "insertAdjacent", "eval(", " style=", "onclick"):
        assert wrong not in code
    async with site.get(path, method="HEAD") as answer:
        assert (answer.status_code, await answer.aread()) == (200, b"")
    async with site.get(path, method="POST") as answer:
        assert answer.status_code == 405


async def test_only_the_files_are_public(site: Site) -> None:
    verbs = site.page.verbs
    assert tuple(path for path, verb in verbs.items() if verb.is_public) == _FILES
    for role, status in (("", 401), ("member", 403), ("push", 200), ("read", 200)):
        async with site.get(EVENTS, role) as answer:
            assert answer.status_code == status
    async with site.get(EVENTS, "read", origin="http://evil.test") as answer:
        assert answer.status_code == 403
    async with site.get(f"{EVENTS}?last=3", "read") as answer:
        assert answer.status_code == 400
    async with site.get("/page.py", "read") as answer:
        assert answer.status_code == 404


@pytest.mark.parametrize("site", ["open to all"], indirect=True)
@pytest.mark.parametrize("path", [EVENTS, "/v1/weightsync/applies"])
async def test_a_site_that_gives_this_address_a_name_reads_nothing(site: Site, path: str) -> None:
    for host in ("127.0.0.1:8551", "[::1]:8551", "localhost:9", "LOCALHOST"):
        async with site.get(path, host=host) as answer:
            assert answer.status_code == 200, host
    for host in ("evil.test", "evil.test:8551", "localhost.evil.test", "127.0.0.1.evil.test", "["):
        # Its page may send any token, which proves nothing where the server knows of none.
        for proof in ({}, {"authorization": "Bearer x"}):
            async with site.get(path, host=host, **proof) as answer:
                refused = json.loads(await answer.aread())
            assert answer.status_code == 403, host
            assert refused["error"].startswith("ask for this by an IP address or as localhost")
    for public in _FILES:
        async with site.get(public, host="evil.test") as answer:
            assert answer.status_code == 200, "it holds no data"


@pytest.mark.parametrize("site", ["open to all, with a name"], indirect=True)
async def test_a_name_of_the_server_may_be_asked(site: Site) -> None:
    for host, status in (("weights.test:8551", 200), ("evil.test", 403)):
        async with site.get("/v1/weightsync/applies", host=host) as answer:
            assert answer.status_code == status


async def test_who_proves_a_role_may_use_any_name(site: Site) -> None:
    async with site.get(EVENTS, "read", host="weights.test") as answer:
        assert answer.status_code == 200


async def test_a_stream_has_all_parts_and_then_only_what_changes(site: Site) -> None:
    async with site.events() as events:
        found = dict([await anext(events) for _ in range(4)])
        assert found.keys() == {"remedies", "status", "versions", "applies"}
        assert found["remedies"].keys() == set(EXPLANATIONS)
        (model,) = found["status"]["models"]
        assert model["model"] == "default"
        assert found["status"]["uptime_s"] is None, "it would change by itself"
        assert found["status"]["invariant_violations"]["only_data"] == 0
        assert found["versions"] == {"versions": [], "next_page_token": ""}
        before = site.looks
        # The disks' room may change at any time; nothing else does.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.5):
                async for name, _ in events:
                    assert name == "status"
        assert site.looks > before + 3


async def test_all_pages_share_one_look_and_none_is_taken_for_nobody(site: Site) -> None:
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(site.events()) for _ in range(8)]
        for events in streams:
            await _until(events, "applies")
        tasks = [task for task in asyncio.all_tasks() if task.get_name() == "status-page"]
        assert len(tasks) == 1
    async with asyncio.timeout(30):
        await asyncio.wait(tasks)
    assert site.page._followers == set()
    looks = site.looks
    await asyncio.sleep(0.3)
    assert site.looks == looks


async def test_one_page_too_many_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_page, "_MOST", 2)
    async with site.events(), site.events():
        async with site.get(EVENTS, "read") as answer:
            refused = json.loads(await answer.aread())
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "10"
        assert refused["reason"] == "LIMIT_EXCEEDED"
        assert refused["error"].startswith("close a status page that is open elsewhere")
    await site.left()
    async with site.events() as events:
        await _until(events, "status")


async def test_one_caller_has_a_share_of_the_pages(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_page, "_SHARE", 2)
    async with site.events("read"), site.events("read"):
        async with site.get(EVENTS, "read") as answer:
            refused = json.loads(await answer.aread())
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "10"
        assert refused["reason"] == "LIMIT_EXCEEDED"
        assert refused["error"].startswith("close one of the 2 status pages that read has open")
        async with site.events("push") as events:
            await _until(events, "status")
    await site.left()
    async with site.events("read") as events:
        await _until(events, "status")


@pytest.mark.parametrize("site", ["open to all"], indirect=True)
async def test_a_host_has_a_share_where_nobody_proves_who_asks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_page, "_SHARE", 1)
    async with site.events(""):
        async with site.get(EVENTS) as answer:
            assert answer.status_code == 429
            assert "that ipv4:127.0.0.1 has open" in (await answer.aread()).decode()
        other = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with (
            httpx.AsyncClient(base_url=site.url, transport=other) as client,
            client.stream("GET", EVENTS) as answer,
        ):
            assert answer.status_code == 200


async def test_who_only_asks_for_the_head_follows_nothing(site: Site) -> None:
    async with site.get(EVENTS, "read", method="HEAD") as answer:
        assert answer.status_code == 200
        await answer.aread()
    await site.left()


async def test_a_token_that_is_taken_back_ends_its_stream(site: Site) -> None:
    async with site.events("read") as events, site.events("push") as others:
        await _until(events, "applies")
        site.write("read")
        refused = await _until(events, "refused")
        assert refused["reason"] == "UNAUTHENTICATED"
        assert [name async for name, _ in events] == []
        await _until(others, "applies")


async def test_silence_has_comments(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_page, "SILENCE_S", 0.02)
    async with site.events() as events:
        assert await _until(events, "") is None


async def test_a_look_that_fails_ends_the_streams_and_the_next_begins_anew(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with site.events() as events:
        await _until(events, "applies")
        with monkeypatch.context() as broken:
            broken.setattr(StatusPage, "_status", lambda _: 1 / 0)
            async with asyncio.timeout(30):
                assert {name async for name, _ in events} <= {"status"}
    assert "the status page could not be read" in caplog.text
    async with site.events() as events:
        await _until(events, "applies")


@pytest.mark.parametrize("site", ["member"], indirect=True)
async def test_nothing_looks_on_after_a_look_that_failed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site.events() as events:
        await _until(events, "fleet")
        looking = [task for task in asyncio.all_tasks() if task.get_name() == "status-page"]
        assert len(looking) == 2, "one at the fleet"
        monkeypatch.setattr(StatusPage, "_status", lambda _: 1 / 0)
        assert "refused" not in {name async for name, _ in events}
    async with asyncio.timeout(30):
        await asyncio.wait(looking)


async def test_the_end_of_the_server_ends_the_streams(site: Site) -> None:
    async with site.events() as events:
        await _until(events, "applies")
        stopping = asyncio.create_task(site.app.stop(30))
        async with asyncio.timeout(20):
            assert {name async for name, _ in events} <= {"status"}
            await stopping


async def test_an_epoch_is_a_change(site: Site) -> None:
    async with site.events() as events, grpc.aio.insecure_channel(site.address) as channel:
        await _until(events, "applies")
        acquire = pb_grpc.WeightSyncStub(channel).AcquireEpoch
        metadata = [("authorization", f"Bearer {site.tokens['push']}")]
        reply = await acquire(pb.AcquireEpochRequest(model="default"), metadata=metadata)
        async with asyncio.timeout(30):
            while (await _until(events, "status"))["models"][0]["epoch"] != reply.epoch:
                pass


def test_a_map_is_a_document() -> None:
    info = pb.VersionInfo(metadata={"step": "7", "__proto__": "x"})
    assert plain_document(info)["metadata"] == {"step": "7", "__proto__": "x"}
    status = pb.GetStatusResponse(invariant_violations={"only_data": 1})
    assert plain_document(status)["invariant_violations"] == {"only_data": 1}
