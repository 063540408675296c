"""The status page in a real Chromium: what it shows of a host and of a fleet, and to whom."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from playwright.sync_api import expect

from benchmarks.servers import free_port
from tests.support.browser import chromium, open_page, take_screenshot, wrong_with
from tests.support.fleet_hosts import make_member
from tests.support.following import FollowingServer, checkpoint, step
from tests.support.secured import Secured
from tests.support.several_engines import engine_host
from weightsync_client import ApplyKind, ClientError, RunningPhase
from weightsync_server.coordination import open_register
from weightsync_server.fleet.fleet_settings import FleetLimits
from weightsync_server.http.status_page import EVENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Locator, Page

    from tests.support.several_engines import EngineHost

# Chromium, a server and its engines start.
pytestmark = pytest.mark.timeout(170)

_HOSTILE = '<img src="/x" onerror="alert(1)"><script>alert(2)</script>'
_MEMBERS = 64
#: Pages that one caller may have open at once.
_SHARE = 8


@pytest.fixture(scope="module")
def browser(program: Callable[[str, str], str]) -> Iterator[Browser]:
    with chromium(program("chromium", "chromium")) as started:
        yield started


def _row(page: Page, table: str, first: str) -> Locator:
    """Return the row of a table whose first cell is that."""
    cells = page.locator("th", has_text=re.compile(f"^{re.escape(first)}$"))
    return page.locator(f'table[data-key="{table}"] > tbody > tr').filter(has=cells)


class Site:
    """A server with two engines, and its page as it is open in a browser.

    `faults` is the plan of the failpoints of engine b.
    """

    def __init__(self, host: EngineHost, page: Page, faults: Path) -> None:
        self.host, self.page, self.faults = host, page, faults
        self.state = page.locator("#state")
        self.client = host.client

    def says(self, text: str) -> None:
        """Return when the page says that of the host."""
        expect(self.state).to_have_text(text)

    def serves(self, version: int = 0) -> int:
        """Return the version that it says to be served on both engines: that one, or the live."""
        version = version or self.client.status().models[0].live_version
        self.says(f"Serving version {version} on 2 engines.")
        return version

    def is_fine(self) -> None:
        assert wrong_with(self.page) == []


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineHost, str, Path]]:
    """The server of this module, where it serves its page, and the plan of faults of engine b."""
    port, faults = free_port(), tmp_path_factory.mktemp("b") / "faults"
    with (
        pytest.MonkeyPatch.context() as environment,
        engine_host("--http", f"127.0.0.1:{port}", named=("a", "b")) as started,
    ):
        started.appear("a")
        environment.setenv("WEIGHTSYNC_FAILPOINTS", f"@{faults}")
        started.appear("b")
        started.all_serve(0)
        yield started, f"http://127.0.0.1:{port}/", faults


@pytest.fixture
def site(browser: Browser, host: tuple[EngineHost, str, Path]) -> Iterator[Site]:
    started, url, faults = host
    with open_page(browser, url) as page:
        site = Site(started, page, faults)
        with site.client:
            site.serves()
            yield site


def test_what_happens_to_a_host_is_seen_while_it_does(site: Site) -> None:
    host, page, client = site.host, site.page, site.client
    first = site.serves()
    expect(page.locator("#connection")).to_have_text("Connected; what is shown is live")
    expect(_row(page, "engine-rows", "b")).to_contain_text("2 of 2 ranks")
    site.is_fine()

    # The keyboard comes by everything in the order of the page, and may skip to the status.
    reached = []
    for _ in range(page.locator("a:visible, button:visible").count()):
        page.keyboard.press("Tab")
        reached.append(page.locator(":focus").inner_text().split()[0])
    assert reached[:3] == ["Skip", "Ranks", "Ranks"]
    page.locator(".skip").press("Enter")
    expect(page.locator("main")).to_be_focused()

    # An apply is held at a failpoint of the server, long enough to be seen on any machine.
    second = host.push(1)
    host.plan("apply.commit=1*sleep(6)")
    with ThreadPoolExecutor(1) as pool:
        applying = pool.submit(client.apply, second)
        # Either is held there; the other waits for it.
        expect(site.state).to_have_text(
            re.compile(
                f"^Applying version {second}: commit and verify on engine [ab]; "
                f"live until it ends: version {first}\\.$"
            )
        )
        expect(_row(page, "engine-rows", "a")).to_contain_text("applying")
        facts = page.locator("#facts > div", has_text="Apply in progress")
        expect(facts).to_contain_text("commit and verify")
        expect(facts).to_contain_text(re.compile(r"for \d+ s, begun \d+ s ago"))
        expect(facts).to_contain_text(f"version {first} → {second}, engine ")
        _is_told(site, first, second)
        site.is_fine()
        take_screenshot(page, "page-apply")
        applying.result()
    site.serves(second)
    expect(facts).to_have_count(0)
    newest = page.locator('table[data-key="apply-rows"] > tbody > tr').first
    expect(newest).to_contain_text(f"{first} → {second}")
    image = newest.get_by_role("img", name=re.compile("prepare .*, pause .*, commit .*, verify"))
    expect(image).to_be_visible()

    # Its ranks, by the keyboard alone.
    number = client.applies(last=1)[0].number
    button = page.get_by_role("button", name=f"Ranks of apply {number}")
    assert button.get_attribute("aria-expanded") == "false"
    button.focus()
    page.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-expanded", "true")
    expect(button).to_be_focused()
    ranks = page.get_by_role("table", name=f"Ranks of apply {number}")
    expect(ranks.get_by_role("row")).to_have_count(1 + 4)
    site.is_fine()

    # The row and the focus stay where they are while a rollback is put above them.
    client.rollback("it repeats itself")
    site.serves(first)
    expect(button).to_be_focused()
    rejected = _row(page, "version-rows", str(second))
    expect(rejected).to_contain_text("rejected: it repeats itself")
    expect(newest).to_contain_text("rollback")
    expect(page.locator("#problems")).to_contain_text(f"Version {second} is not live")
    site.is_fine()

    # All is well, and says so.
    for content in (3, 4):
        third = host.push(content, metadata={"run_id": "grpo-7b", "step": f"{40 * content}"})
        client.apply(third)
    site.serves(third)
    expect(page.locator("#attention")).to_be_hidden()
    expect(_row(page, "version-rows", str(third))).to_contain_text("grpo-7b, client ")
    expect(_row(page, "version-rows", str(third))).to_contain_text("160")
    button.press("Enter")
    site.is_fine()
    _take_screenshots(page)


def _cli(site: Site, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "weightsync_client.cli", *arguments],
        env=os.environ | {"WEIGHTSYNC_ADDRESS": site.host.server.address},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def _is_told(site: Site, first: int, second: int) -> None:
    """What the page shows of the apply that runs is what GetStatus says, and people read of it."""
    (model,) = site.client.status().models
    running = model.running_apply
    assert running is not None
    assert running.phase is RunningPhase.COMMIT
    assert (running.previous_version, running.version) == (first, second)
    assert (running.apply_id, running.took_s > running.in_phase_s > 0) == (model.apply_id, True)
    phases = {one.running_apply.phase for one in model.engines if one.running_apply}
    assert phases == {RunningPhase.COMMIT, RunningPhase.WAIT}
    told = _cli(site, "status")
    assert re.search(
        rf"apply {model.apply_id} in progress: version {first} -> {second}, commit and verify of "
        r"engine [ab] for [0-9.]+ s \(begun [0-9.]+ s ago\)",
        told,
    ), told
    document = json.loads(_cli(site, "status", "--json"))
    assert document["models"][0]["running_apply"]["phase"] == "commit"


def _take_screenshots(page: Page) -> None:
    """Show the docs a host where all is well: the upper part, and the whole on a phone."""
    for name in ("a", "b"):
        ranks = page.get_by_role("table", name=f"Ranks of engine {name}")
        expect(ranks).to_be_visible()
        page.get_by_role("button", name=f"Ranks of engine {name}").click()
        expect(ranks).to_have_count(0)
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.set_viewport_size({"width": 1000, "height": 1250})
    take_screenshot(page, "page-idle")
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    take_screenshot(page, "page-phone")


def test_a_fence_and_a_failed_apply_are_shown_with_the_remedy(site: Site) -> None:
    host, page = site.host, site.page
    version = host.push(2)
    site.faults.write_text("worker.reply=lie(content_digest);worker.tell=lie(content_digest)")
    with pytest.raises(ClientError, match="fenced"):
        site.client.apply(version)
    expect(site.state).to_contain_text("Engine b is fenced.")
    problems = page.locator("#problems")
    expect(problems).to_contain_text("Engine b is fenced")
    expect(problems).to_contain_text("What to do: Wait for the server's next try, or restart vLLM")
    expect(problems).to_contain_text(f"The last apply of version {version} was fenced")
    assert page.title().startswith("⚠ ")
    site.is_fine()
    take_screenshot(page, "page-fenced")
    site.faults.unlink()
    expect(site.state).not_to_contain_text("fenced")
    host.disappear("b")
    expect(site.state).to_contain_text("Engine b is away.")
    expect(problems).to_contain_text(re.compile("It last answered .* ago"))
    host.appear("b")


def test_an_open_push_is_shown_and_a_server_that_went_is_found_again(site: Site) -> None:
    server, page = site.host.server, site.page
    expect(page.locator("#pushes")).to_have_text("No push is open.")
    program = ["-m", "tests.support.half_push", server.address]
    with subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE) as trainer:
        try:
            row = page.locator('table[data-key="push-rows"] > tbody > tr')
            expect(row).to_contain_text("524.3 kB of 1.0 MB (49 %)")
            expect(row).to_contain_text("0 B/s")
            bar = row.get_by_role("progressbar", name=re.compile("Push of version"))
            assert float(bar.get_attribute("value") or 0) == 1 << 19
            site.is_fine()
        finally:
            trainer.kill()
    server.stop()
    expect(page.locator("#connection")).to_contain_text("The server does not answer")
    server.start()
    expect(page.locator("#connection")).to_have_text("Connected; what is shown is live")
    site.serves()

    # One that hangs is no better, though its connections stay open; a minute is as good as passed.
    page.clock.install()
    page.reload()
    site.serves()
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        page.clock.fast_forward(60_000)
        expect(page.locator("#connection")).to_contain_text("The server does not answer")
    finally:
        server.process.send_signal(signal.SIGCONT)
    expect(page.locator("#connection")).to_have_text("Connected; what is shown is live")


def test_a_page_that_is_one_too_many_says_so_and_is_shown_later(
    browser: Browser, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    server = FollowingServer(tmp_path, "--http", f"127.0.0.1:{port}")
    with server.running(), contextlib.ExitStack() as others:
        for _ in range(_SHARE):
            stream = others.enter_context(httpx.stream("GET", url + EVENTS[1:], trust_env=False))
            assert stream.status_code == 200
        with open_page(browser, url) as page:
            connection = page.locator("#connection")
            expect(connection).to_contain_text(f"Refused: close one of the {_SHARE} status pages")
            others.close()
            expect(connection).to_have_text("Connected; what is shown is live")


#: Lets a test hide and show a page as a browser does with its tabs; one without a screen shows all.
_TABS = """
let shown = !location.hash.includes("hidden");
Object.defineProperty(Document.prototype, "hidden", { get: () => !shown });
window.setShown = (now) => { shown = now; document.dispatchEvent(new Event("visibilitychange")); };
"""


def test_a_hidden_page_holds_no_stream_and_a_shown_one_follows_again(
    browser: Browser, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    server = FollowingServer(tmp_path, "--http", f"127.0.0.1:{port}")
    asked: list[str] = []

    def streams() -> int:
        """Return how many of this caller's are open, by how many more it may open."""
        with contextlib.ExitStack() as stack:
            for more in range(_SHARE + 1):
                stream = httpx.stream("GET", url + EVENTS[1:], trust_env=False)
                if stack.enter_context(stream).status_code == 429:
                    return _SHARE - more
        raise AssertionError("there is no bound")

    def until(count: int) -> None:
        end = time.monotonic() + 60
        while streams() != count:
            assert time.monotonic() < end
            time.sleep(0.2)

    with open_page(browser, "about:blank") as page:
        page.add_init_script(_TABS)
        page.on("request", lambda request: asked.append(request.url))
        connection = page.locator("#connection")
        with server.running():
            # Opened in a tab behind: it asks for nothing before it is shown.
            page.goto(f"{url}#hidden")
            expect(connection).to_have_text("Not followed while this tab is hidden")
            assert url + EVENTS[1:] not in asked
            page.evaluate("setShown(true)")
            expect(connection).to_have_text("Connected; what is shown is live")
            until(1)
            page.evaluate("setShown(false)")
            expect(connection).to_have_text("Not followed while this tab is hidden")
            until(0)
        # Hidden, it tries nothing again, whatever becomes of the server.
        before = len(asked)
        page.wait_for_timeout(3000)
        assert len(asked) == before
        with server.running():
            page.evaluate("setShown(true)")
            expect(connection).to_have_text("Connected; what is shown is live")


def test_two_hundred_versions_and_names_that_a_trainer_chose(browser: Browser) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="wsp") as folder:
        server = FollowingServer(
            Path(folder),
            *("--http", f"127.0.0.1:{port}", "--retain-versions", "300", "--slots", "3"),
        )
        with server.running() as client:
            tensors = checkpoint(1)
            for number in range(201):
                metadata = {"step": str(number), "run_id": _HOSTILE, "__proto__": _HOSTILE}
                pushed = client.push(step(tensors, number), metadata=metadata, delta="never")
            client.apply(pushed.version)
            client.rollback(_HOSTILE)
            with open_page(browser, f"http://127.0.0.1:{port}/") as page:
                rows = page.locator('table[data-key="version-rows"] > tbody > tr')
                expect(rows).to_have_count(20)
                expect(page.locator("#versions caption")).to_contain_text(
                    "200 versions, newest first; times in UTC; older ones: weightsync versions"
                )
                expect(page.locator(".timeline span")).to_have_count(200)
                expect(rows.first).to_contain_text(f"rejected: {_HOSTILE}")
                expect(rows.first).to_contain_text(f"{_HOSTILE}, client ")
                button = page.locator("#versions button")
                expect(button).to_have_text("Show all 200 versions")
                button.press("Space")
                expect(rows).to_have_count(200)
                assert wrong_with(page) == []
                assert page.locator("img, script:not([src])").count() == 0
                # What was pushed meanwhile is put above the others.
                last = client.push(step(tensors, 1), metadata={"run_id": "mine"}).version
                expect(rows.first).to_contain_text(str(last))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[str]:
    """Run all members of a fleet but one, without weights, and return where it decides."""
    register, began, over = tmp_path / "register", threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        store = open_register(f"{register.as_uri()}/f")
        limits = FleetLimits(poll_s=1.0)
        members = [
            make_member(store, tmp_path / f"m{number:02}", limits) for number in range(1, _MEMBERS)
        ]
        tasks = [asyncio.create_task(member.run()) for member in members]
        began.set()
        await over.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert began.wait(60)
        yield register.as_uri()
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def test_a_fleet_of_64_members_is_a_table_of_their_versions(browser: Browser, fleet: str) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="wsp") as folder:
        flags = ["--fleet", "f", "--fleet-register", fleet, "--fleet-member", "m00"]
        server = FollowingServer(Path(folder), *flags, "--http", f"127.0.0.1:{port}")
        with server.running() as client, open_page(browser, f"http://127.0.0.1:{port}/") as page:
            rows = page.locator('table[data-key="member-rows"] > tbody > tr')
            expect(rows).to_have_count(_MEMBERS)
            version = client.push(step(checkpoint(1), 3), delta="never").version
            assert client.fleet_apply(version, order="barrier").decision == "COMMIT"
            expect(page.locator("#fleet")).to_contain_text(
                f"version {version} is decided; {_MEMBERS} of {_MEMBERS} members serve it"
            )
            expect(_row(page, "member-rows", "m00 (this server)")).to_contain_text("done")
            expect(_row(page, "member-rows", "m63")).to_contain_text(str(version))
            assert wrong_with(page) == []
            record = next(one for one in client.applies() if one.kind is ApplyKind.FLEET_APPLY)
            expect(page.locator("#applies")).to_contain_text("fleet apply")
            assert record.version == version


def test_a_page_shows_nothing_without_a_token_and_asks_for_one(
    browser: Browser, tmp_path: Path
) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="wsp") as folder:
        secured = Secured(
            Path(folder), flags=("--http", f"127.0.0.1:{port}", "--engine", "none")
        ).start()
        try:
            with open_page(browser, f"http://127.0.0.1:{port}/") as page:
                field = page.get_by_label("Token with the role read")
                expect(field).to_be_focused()
                expect(page.locator("#status")).to_be_hidden()
                assert wrong_with(page) == []
                field.fill("not a token")
                page.keyboard.press("Enter")
                expect(page.get_by_role("alert")).to_contain_text("without a space")
                for wrong, why in (
                    ("nonsense", "refused the token"),
                    (secured.tokens["other"], "no authority"),
                ):
                    field.fill(wrong)
                    page.keyboard.press("Enter")
                    expect(page.get_by_role("alert")).to_contain_text(why)
                field.fill(secured.tokens["read"])
                page.keyboard.press("Enter")
                expect(page.locator("#state")).to_have_text("No engine is connected.")
                assert page.locator("#access").is_hidden()
                # It is kept for the tab, and nowhere else.
                page.reload()
                expect(page.locator("#state")).to_have_text("No engine is connected.")
                assert page.evaluate("localStorage.length") == 0
                assert page.context.cookies() == []
                # A token that is taken back ends the stream that it has opened.
                secured.write(read="other-token-of-the-same-role")
                expect(field).to_be_visible()
                expect(page.locator("#status")).to_be_hidden()
        finally:
            secured.stop()
