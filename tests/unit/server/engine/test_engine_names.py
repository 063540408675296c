"""Engines are told apart by the names of their sockets."""

from __future__ import annotations

import pytest
from pydantic_settings import CliApp

from weightsync.host_dirs import run_dir
from weightsync_server.engine.engine_set import check_engines, engine_name
from weightsync_server.flags import Flags


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("unix:/run/weightsync/engine.sock", "engine"),
        ("unix:/run/engines/gpu.0.sock", "gpu.0"),
        ("unix:bare", "bare"),
        ("embedded", "embedded"),
        ("memory", "memory"),
    ],
)
def test_names(engine: str, name: str) -> None:
    check_engines([engine])
    assert engine_name(engine) == name


@pytest.mark.parametrize(
    ("engines", "sentence"),
    [
        (["unix:/a/x.sock", "unix:/b/x.sock"], "two engines would be called x"),
        (["unix:/a/x.sock", "unix:/a/x.sock"], "two engines would be called x"),
        (["memory", "unix:/a"], "name engine memory alone"),
        (["none", "none"], "name engine none alone"),
        (["127.0.0.1:1"], "engine must be unix:PATH"),
        (["unix:"], "engine must name a socket"),
        (["unix:/run/*.sock"], "engine must name a socket"),
        (["unix:/run/.sock"], "engine must name a socket"),
        ([""], "engine must"),
    ],
)
def test_what_is_refused(engines: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_engines(engines)


def _engine_names(*flags: str) -> list[str]:
    tree = CliApp.run(Flags, cli_args=list(flags)).tree
    return tree.engines.names(tree.paths.run_dir)


def test_defaults() -> None:
    assert _engine_names() == [f"unix:{run_dir()}/engine.sock"]
    assert _engine_names("--run-dir=/run/x") == ["unix:/run/x/engine.sock"]
    assert _engine_names("--engines=/run/engines") == []
    assert _engine_names("--engine=none") == ["none"]
    assert _engine_names("--engine=unix:/a", "--engine=unix:/b") == ["unix:/a", "unix:/b"]
    with pytest.raises(ValueError, match="or engine, not both"):
        _engine_names("--engine=unix:/a", "--engines=/b")
