"""The examples of docs/how-to/extending.md, as the page has a reader make them, in a copy."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.planted.plants import ROOT, Edit, Plant, copy_tree
from tests.support.following import FollowingServer, checkpoint, staged, step, until
from tests.support.snippets import blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.snippets import Snippet
    from weightsync_client import Client

pytestmark = pytest.mark.timeout(300)

_PAGE = "docs/how-to/extending.md"
_STORE = "server/weightsync_server/store/sqlite_store.py"
_TRANSFORM = "weightsync/vllm/worker/finite_transform.py"
_STORE_TESTS, _RANK_TESTS = (
    "tests/unit/server/store/test_stores.py",
    "tests/unit/vllm/worker/test_rank.py",
)
#: What is mostly wrong at first: which text of a file, what stands there instead, and the test.
_MISTAKES = {
    "not_flushed": (
        Edit(_STORE, "            durable_files.flush_directory(folder)\n", "            pass\n"),
        f"{_STORE_TESTS}::test_a_version_does_not_exist_before_the_names_of_its_shards_last",
    ),
    "no_epoch": (
        Edit(
            _STORE,
            "                check_epoch(record.epoch, _value(",
            "                print(record.epoch, _value(",
        ),
        f"{_STORE_TESTS}::test_only_the_newest_epoch_commits",
    ),
    "overwrites": (
        Edit(_STORE, "_parsed(row)[0].content_digest != record.content_digest", "not row"),
        f"{_STORE_TESTS}::test_committing_again_changes_nothing",
    ),
    "claims": (
        Edit(
            _TRANSFORM, "        return self._inner.compare(target, stop)\n", "        return []\n"
        ),
        f"{_RANK_TESTS}::test_adoption_of_other_weights_is_not_proved",
    ),
}


def _page(language: str) -> list[Snippet]:
    return [one for one in blocks() if one.page == _PAGE and one.language == language]


def _edit(block: Snippet) -> Edit:
    """Read what a block of the page changes."""
    file, *lines = block.text.splitlines(keepends=True)
    old, new = ([line[1:] for line in lines if line[0] in kind] for kind in (" -", " +"))
    return Edit(file.strip(), "".join(old), "".join(new))


def _change(tree: Path, edit: Edit) -> None:
    for file, text in Plant("extending", "", "", (), (edit,)).edited(tree).items():
        (tree / file).write_text(text)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree with all three examples, made as the page says."""
    made = tmp_path_factory.mktemp("tree")
    copy_tree(made)
    for block in _page("sh"):
        for source, folder in re.findall(r"^cp (\S+) (\S+)$", block.text, re.MULTILINE):
            shutil.copy2(ROOT / source, made / folder)
    for block in _page("text"):
        _change(made, _edit(block))
    return made


def _environment(tree: Path) -> dict[str, str]:
    paths = os.pathsep.join(str(tree / part) for part in ("", "server", "client"))
    return {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}


def _pytest(tree: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments],
        cwd=tree,
        env=os.environ | _environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def _push(client: Client, tensors: dict[str, torch.Tensor], number: int) -> int:
    return client.push(step(tensors, number), metadata={"step": str(number)}).version


def _equal(client: Client, version: int, expected: dict[str, torch.Tensor]) -> bool:
    found = {tensor.name: tensor.torch().clone() for tensor in client.tensors(version)}
    same = found.keys() == expected.keys()
    return same and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_page_has_one_file_and_one_list_for_each_example() -> None:
    copied = re.findall(r"^cp (\S+) (\S+)$", "".join(b.text for b in _page("sh")), re.MULTILINE)
    names = {path.name for path in (ROOT / "examples/extending").glob("[!_]*.py")}
    assert {source.rpartition("/")[2] for source, _ in copied} == names
    files = [_edit(block).file for block in _page("text")]
    assert {file for file in files if not file.startswith("tests/")} == {
        "server/weightsync_server/store/__init__.py",
        "weightsync/vllm/worker/rank.py",
    }


def test_the_page_is_short_enough_to_be_read() -> None:
    text = re.sub(r"```.*?```", "", (ROOT / _PAGE).read_text(), flags=re.DOTALL)
    prose = [part for part in text.split("\n\n") if not part.startswith("|")]
    assert sum(len(part.split()) for part in prose) <= 1200
    assert max(len(part.split()) for part in prose) <= 120


# Another source of versions


class _Files(SimpleHTTPRequestHandler):
    """A plain web server, of which shards may arrive damaged."""

    damages = False

    def copyfile(self, source: Any, outputfile: Any) -> None:
        data = bytearray(source.read())
        if self.damages and self.path.endswith(".safetensors"):
            data[-1] ^= 1
        outputfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def _web(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_versions_are_followed_over_a_plain_web_server(
    tree: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, tensors = FollowingServer(folder / "a"), checkpoint(2)
    with origin.running() as trainer, _web(origin.store) as url:
        for number in range(3):
            version = trainer.get_version(_push(trainer, tensors, number))
        assert version.chain_length > 0, "the reader would not meet a delta"
        follower = FollowingServer(folder / "b", "--follow", url, variables=_environment(tree))
        with follower.running() as client:
            until(lambda: staged(client, version), "the newest version is staged")
            assert _equal(client, version.version, tensors)
            version = trainer.get_version(_push(trainer, tensors, 3))
            until(lambda: staged(client, version), "the version after it is staged")
            client.apply(version.version)
            assert client.verify().content_digest == version.content_digest
            monkeypatch.setattr(_Files, "damages", True)
            bad = trainer.get_version(_push(trainer, tensors, 4))
            until(lambda: "do not match their checksum" in follower.log, "the damage is found")
            assert not staged(client, bad)
            monkeypatch.setattr(_Files, "damages", False)
            until(lambda: staged(client, bad), "it is staged once it comes as it is")
            assert _equal(client, bad.version, tensors)


# Another store


def test_a_server_keeps_versions_in_a_database(tree: Path, folder: Path) -> None:
    url = f"sqlite://{folder}/versions"
    server = FollowingServer(folder / "a", "--store", url, variables=_environment(tree))
    tensors = checkpoint(2)
    with server.running() as client:
        epoch = client.acquire_epoch()
        for number in range(3):
            newest = _push(client, tensors, number)
        client.apply(newest)
        known = {version.version: version.content_digest for version in client.versions()}
        assert newest in known
    with server.running() as client:
        assert {v.version: v.content_digest for v in client.versions()} == known
        assert _equal(client, newest, tensors)
        assert client.verify().version == newest
        assert client.acquire_epoch() > epoch
        client.rollback()
        assert client.verify().version == 1
    with contextlib.closing(sqlite3.connect(folder / "versions/versions.sqlite3")) as database:
        rows = database.execute("SELECT version FROM versions").fetchall()
    assert {version for (version,) in rows} == set(known)


def test_the_store_passes_the_tests_of_all_stores(tree: Path) -> None:
    (command,) = re.findall(r"python -m (pytest .*-k sqlite)", "".join(b.text for b in _page("sh")))
    answer, output = _pytest(tree, *command.split()[1:])
    assert answer == 0, output
    assert " passed" in output


# Another strategy in a rank


def test_a_rank_keeps_its_promises_and_refuses_what_is_not_finite(tree: Path) -> None:
    answer, output = _pytest(tree, _RANK_TESTS, "tests/matrix/extended_rank.py")
    assert answer == 0, output


@pytest.mark.parametrize(
    "mistake",
    [
        "not_flushed",
        pytest.param("no_epoch", marks=pytest.mark.battery),
        pytest.param("overwrites", marks=pytest.mark.battery),
        "claims",
    ],
)
def test_a_mistake_is_found_by_the_test_that_the_page_names(tree: Path, mistake: str) -> None:
    edit, test = _MISTAKES[mistake]
    assert f"`{test.rpartition('::')[2]}`" in (ROOT / _PAGE).read_text()
    kind = ["-k", "sqlite"] if edit.file == _STORE else []
    with Plant("extending", "", "", (), (edit,)).apply(tree):
        answer, output = _pytest(tree, test, *kind)
    assert (answer, "1 failed" in output) == (1, True), output
