"""Who may join a head as a node: over TLS, with a token of the role member, and nobody else."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.node_process import NodeProcess
from tests.support.secured import Secured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def head() -> Iterator[Secured]:
    folder = Path(tempfile.mkdtemp(prefix="na-"))
    head = Secured(folder, tls=True)
    try:
        yield head.start()
        assert head.stop() == 0
    finally:
        head.server.kill()
        shutil.rmtree(folder)


@pytest.fixture
def join(head: Secured) -> Iterator[Callable[[str, int], NodeProcess]]:
    made: list[NodeProcess] = []

    def join(role: str, rank: int) -> NodeProcess:
        token = head.folder / f"{role}.token"
        token.touch(mode=0o600)
        token.write_text(head.tokens[role])
        flags = ["--follow-ca", str(head.ca.ca), "--follow-token-file", str(token)]
        node = NodeProcess(head.address, head.folder / role, rank=rank, flags=flags)
        made.append(node)
        return node.start()

    yield join
    for node in made:
        assert node.stop() == 0


def _until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_member_joins(head: Secured, join: Callable[[str, int], NodeProcess]) -> None:
    node = join("member", 1)
    _until(lambda: "the weightsync-server of node 1 has joined" in head.server.log)
    assert node.stop() == 0
    _until(lambda: [line["method"] for line in head.audit()] == ["Join"])
    (line,) = head.audit()
    assert (line["role"], line["model"]) == ("member", "default")


@pytest.mark.parametrize("role", ["follow", "read"])
def test_nobody_else_does(
    head: Secured, join: Callable[[str, int], NodeProcess], role: str
) -> None:
    node = join(role, 2)
    _until(lambda: "member" in node.log)
    assert "node 2 has joined" not in head.server.log
