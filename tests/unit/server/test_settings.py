from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from weightsync import __version__, host_dirs
from weightsync.wire.grpc_channels import is_private
from weightsync_server import flags
from weightsync_server.flags import Flags
from weightsync_server.ops.settings_group import setting
from weightsync_server.settings import Settings

FLEET = {"fleet": "f", "fleet_register": "file:///r", "fleet_member": "host0"}


@dataclass(frozen=True)
class _Colliding:
    mine: str = setting("", "what the core's is called", name="store")


def test_two_settings_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "settings_groups", lambda: (_Colliding,))
    with pytest.raises(ValueError, match="two groups of settings have a store; rename one"):
        flags._ordered()


def test_the_register_is_read_often_enough_for_what_a_host_may_not_have_read() -> None:
    assert _made(**FLEET).fleet.limits.poll_s == 10
    limits = _made(**FLEET, max_age_s=3, undecided_limit_s=4).fleet.limits
    assert (limits.poll_s, limits.max_age_s, limits.undecided_s) == (1, 3, 4)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WEIGHTSYNC_")]:
        monkeypatch.delenv(name)


def _made(**values: Any) -> Settings:
    return Flags(**values).tree


def _flags(*flags: str) -> Settings:
    return CliApp.run(Flags, cli_args=list(flags)).tree


def test_defaults_are_private_and_durable() -> None:
    made = _made()
    assert all(is_private(address) for address in made.listeners.listen)
    assert made.paths.store_url == f"file://{host_dirs.state_dir()}/store"
    assert made.paths.segment_socket == host_dirs.run_dir() / "segments.sock"
    assert made.metrics.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("unix:/run/x.sock", True),
        ("127.0.0.1:1", True),
        ("127.8.9.10:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        (":1", False),
        ("10.0.0.1:1", False),
        ("localhost.example.com:1", False),
        ("127.0.0.1.example.com:1", False),
        ("dns:///127.0.0.1:1", False),
        ("example.com:1", False),
    ],
)
def test_what_only_this_host_can_reach(address: str, private: bool) -> None:
    assert is_private(address) is private
    if not private:
        with pytest.raises(ValidationError, match="give --tls-cert"):
            _made(listen=["unix:/x", address])


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_SLOTS", "3")
    monkeypatch.setenv("WEIGHTSYNC_NAME", "from-env")
    monkeypatch.setenv("WEIGHTSYNC_LISTEN", '["unix:/a", "127.0.0.1:0"]')
    made = _flags("--slots", "4", "--state-dir", "/tmp/s", "--no-reflection")
    assert (made.model.slots, made.name, made.reflection) == (4, "from-env", False)
    assert made.listeners.listen == ["unix:/a", "127.0.0.1:0"]
    assert made.paths.store_url == "file:///tmp/s/store"


@pytest.mark.parametrize(
    "flags",
    [
        ["--listen", "unix:/a", "--listen", "unix:/b"],
        ["--listen", "unix:/a,unix:/b"],
        ["--listen", '["unix:/a"]', "--listen", "unix:/b"],
    ],
)
def test_several_addresses(flags: list[str]) -> None:
    assert _flags(*flags).listeners.listen == ["unix:/a", "unix:/b"]


#: Engines and host names are no addresses; the former have their test in tests/unit/server/engine.
SEVERAL = [
    name
    for name, field in Flags.model_fields.items()
    if "list" in str(field.annotation) and name not in ("engine", "host_names")
]


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("127.0.0.1:51551", ["127.0.0.1:51551"]),
        ("[::1]:1", ["[::1]:1"]),
        ("[::1]:1,[::1]:2", ["[::1]:1", "[::1]:2"]),
        ("unix:/a, unix:/b?role=push", ["unix:/a", "unix:/b?role=push"]),
        ('["unix:/a", "127.0.0.1:0"]', ["unix:/a", "127.0.0.1:0"]),
        (' ["unix:/a,b"] ', ["unix:/a,b"]),
    ],
)
def test_several_values_are_written_alike_in_flags_and_variables(
    monkeypatch: pytest.MonkeyPatch, name: str, written: str, meant: list[str]
) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert getattr(CliApp.run(Flags, cli_args=[flag, written]), name) == meant
    monkeypatch.setenv(f"WEIGHTSYNC_{name.upper()}", written)
    assert getattr(CliApp.run(Flags, cli_args=[]), name) == meant


def test_host_names_are_names_alone() -> None:
    flags = CliApp.run(Flags, cli_args=["--host-names", "weightsync, Ws.prod.svc,.example.com"])
    assert flags.host_names == ["weightsync", "Ws.prod.svc", ".example.com"]  # type: ignore[attr-defined]  # made of settings
    for wrong in ("ws:9551", "http://ws", "*", "*.example.com", ".", "a..b", "-a", "a b", "[::1]"):
        with pytest.raises(ValidationError, match="host_names must be names such as"):
            _made(host_names=[wrong])


@pytest.mark.parametrize("written", ["", "[]", " , "])
def test_a_variable_without_an_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_LISTEN", written)
    with pytest.raises(ValidationError, match="at least one address"):
        _flags()


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:", "::1", "::1:5055", "[::1]", "example.com", '["a:1"', ""]
)
def test_an_address_without_a_port_is_told_so(address: str) -> None:
    with pytest.raises(ValidationError, match="has no port; write HOST:PORT, such as 127") as told:
        _made(listen=[address])
    assert "other hosts" not in str(told.value)


@pytest.mark.parametrize("written", ["debug", "INFO", "Warning", "error", "CRITICAL"])
def test_levels_of_the_log(written: str) -> None:
    assert _made(log_level=written).log_level == written.upper()


@pytest.mark.parametrize("written", ["text", "json", "JSON"])
def test_formats_of_the_log(written: str) -> None:
    assert _made().log_format == "text"
    assert _made(log_format=written).log_format == written.lower()


@pytest.mark.parametrize("name", ["qwen2-0.5b", "A", "a.b_c-d", "x" * 128])
def test_names(name: str) -> None:
    assert _made(name=name).name == name


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "../a", "a b", "ä", "a\n", "x" * 129])
def test_bad_names(name: str) -> None:
    with pytest.raises(ValidationError, match="name must match"):
        _made(name=name)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"engine": "http://vllm:8000"}, "engine must be unix:PATH"),
        ({"engine": "embedded"}, "give both or neither"),
        ({"engine": "memory"}, "give both or neither"),
        ({"model": "/somewhere"}, "give both or neither"),
        ({"ranks": 2}, "leave ranks out: it is only for --engine memory"),
        ({"model": "/models/x"}, "give both or neither"),
        ({"listen": []}, "at least one address"),
        ({"listen": ["unix:/a?role=push", "unix:/a?role=read"]}, "unix:/a is named twice"),
        ({"listen": ["unix:/a", "127.0.0.1:1", "unix:/a"]}, "unix:/a is named twice"),
        ({"slots": 1}, "slots"),
        ({"fetchers": 0}, "fetchers"),
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"commit_timeout_s": 0}, "commit_timeout_s"),
        ({"pause_lease_s": 0.1}, "pause_lease_s"),
        ({"retain_versions": 1}, "retain_versions"),
        ({"slotz": 3}, "slotz"),
        ({"prepare_timeout_s": float("nan")}, "prepare_timeout_s"),
        ({"follow": "memory://"}, "follow cannot be 'memory://'; use grpc://HOST:PORT"),
        ({"follow": "grpc://trainer:50551"}, "use grpcs://HOST:PORT, or give --follow-ca"),
        ({"follow": "s3://a/b", "store": "s3://a/c"}, "keeps what it fetches in a folder"),
        ({"follow_ca": "/ca.pem"}, "name the origin with it"),
        ({"fleet": "f"}, "fleet and fleet_register go together"),
        (FLEET | {"fleet_register": "http://a/x"}, "no register can be opened at 'http://a/x'"),
        (
            FLEET | {"fleet_register": "etcd://a/x"},
            "'a' in 'etcd://a/x/f' is not an address of etcd",
        ),
        ({"fleet_register": "file:///r"}, "fleet and fleet_register go together"),
        ({"fleet_ca": "/ca.pem"}, "are for --fleet; name one"),
        ({**FLEET, "fleet": "a/b"}, "is not a valid name of a fleet"),
        ({**FLEET, "fleet_member": "-x"}, "is not a valid name of a member"),
        ({"undecided_limit_s": 0}, "undecided_limit_s"),
        ({"max_skew": -1}, "max_skew"),
        ({"max_age_s": -1.0}, "max_age_s"),
        ({"member_ttl_s": 0}, "member_ttl_s"),
        ({"max_unavailable": 0}, "max_unavailable"),
    ],
)
def test_values_that_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        _made(**values)


def test_they_never_change() -> None:
    made: Any = Flags()
    with pytest.raises(ValidationError):
        made.slots = 5


def test_every_setting_is_explained() -> None:
    for name, field in Flags.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


@pytest.mark.parametrize("metrics", ["127.0.0.1:0", "[::1]:9551", "localhost:9551", ""])
def test_metrics_for_this_host(metrics: str) -> None:
    assert _made(metrics=metrics).metrics == metrics


@pytest.mark.parametrize(
    "metrics", ["0.0.0.0:9551", "[::]:9551", ":9551", "10.0.0.1:9551", "unix:9551", "example:9551"]
)
def test_metrics_for_other_hosts_must_be_meant(metrics: str) -> None:
    with pytest.raises(ValidationError, match="give --metrics-open where"):
        _made(metrics=metrics)
    assert _flags("--metrics", metrics, "--metrics-open").metrics == metrics


@pytest.mark.parametrize(
    "metrics", ["9551", "127.0.0.1", "127.0.0.1:", "localhost:http", "a:65536"]
)
def test_metrics_without_host_or_port_are_named(metrics: str) -> None:
    with pytest.raises(ValidationError, match="metrics must be HOST:PORT"):
        _made(metrics=metrics, metrics_open=True)


@pytest.mark.parametrize("http", ["0.0.0.0:8551", "[::]:8551", ":8551", "10.0.0.1:0", "example:1"])
def test_http_for_other_hosts_takes_tls_and_authority(http: str) -> None:
    with pytest.raises(
        ValidationError, match="reached from other hosts; give --tls-cert"
    ) as caught:
        _made(http=http)
    assert "unix:" not in str(caught.value).partition("[type=")[0], "it takes none"
    tls = {"tls_cert": "/c", "tls_key": "/k"}
    with pytest.raises(ValidationError, match="without authentication; give --authority"):
        _made(http=http, **tls)
    made = _made(http=http, authority="/a", **tls)
    assert [endpoint.address for endpoint in made.http_endpoints] == [http]


@pytest.mark.parametrize("http", ["8551", "127.0.0.1", "127.0.0.1:", "localhost:http", "a:65536"])
def test_http_without_host_or_port_is_named(http: str) -> None:
    with pytest.raises(ValidationError, match="http must be HOST:PORT, such as"):
        _made(http=http)


def test_http_is_off_and_folders_are_absolute() -> None:
    assert not _made().http_endpoints
    made = _flags("--http", "127.0.0.1:0", "--import-dir", "/a/b", "--import-dir", "c")
    assert made.import_folders == [Path("/a/b"), Path.cwd() / "c"]


def _run(flags: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weightsync_server.cli", *flags],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--metrics", "0.0.0.0:1"], "give --metrics-open"),
        (["--listen", "0.0.0.0:1"], "weightsync-server: 0.0.0.0:1 can be reached"),
        (["--listen", "127.0.0.1"], "weightsync-server: listen: '127.0.0.1' has no port; "),
        (["--name", "a/b"], "weightsync-server: name: name must match"),
        (["--log-level", "nope"], "log_level: must be DEBUG, INFO, WARNING, ERROR or CRITICAL"),
        (["--log-format", "xml"], "log_format: must be text or json, not 'xml'"),
        (["--slots", "many"], "slots: "),
        (["--nonsense", "1"], "nonsense"),
    ],
)
def test_the_command_line_tells_the_flag_and_ends_with_2(flags: list[str], told: str) -> None:
    done = _run(flags)
    assert done.returncode == 2
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert "Value error" not in done.stderr


@pytest.mark.parametrize("flags", [["--version"], ["--slots", "3", "--version"]])
def test_the_version_is_printed_as_by_the_client(flags: list[str]) -> None:
    done = _run(flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


def test_every_limit_is_explained_with_its_default() -> None:
    page = Path(__file__).parents[3].joinpath("docs/reference/limits.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", page, re.MULTILINE))
    made = Flags()
    assert rows == {
        name: f"{getattr(made, name):g}"
        if isinstance(getattr(made, name), float)
        else str(getattr(made, name))
        for name in rows
    }
    prefixes = ("max_", "retain_", "push_", "reader_", "disk_", "slots", "memory_", "delta_")
    of_trainers = ("trainer_queue", "trainer_start_", "trainer_silence_", "trainer_grace_")
    limits = (*prefixes, *of_trainers, "checkpoint_folders", "in_place_", "apply_history")
    assert set(rows) == {name for name in Flags.model_fields if name.startswith(limits)}


def test_ingest_processes_listen_beside_every_address_that_takes_pushes() -> None:
    made = _made(
        listen=["127.0.0.1:50551", "unix:/run/w.sock?role=push", "unix:/run/r.sock?role=read"],
        ingest=2,
    )
    assert [str(endpoint) for endpoint in made.listeners.of_ingest(1)] == [
        "127.0.0.1:50553",
        "unix:/run/w.sock.2?role=push",
    ]
    assert (
        _made(listen=["127.0.0.1:0"], ingest=1).listeners.of_ingest(0)[0].address == "127.0.0.1:0"
    )
    assert _made().ingest == 0


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"listen": ["127.0.0.1:1", "127.0.0.1:2"], "ingest": 1},
            "leave the ports after each port",
        ),
        ({"listen": ["127.0.0.1:65534"], "ingest": 2}, "choose a lower one"),
        ({"listen": ["localhost:http"], "ingest": 1}, "choose a lower one"),
        ({"listen": ["unix:/r?role=read"], "ingest": 1}, "give --ingest 0"),
        ({"ingest": 9}, "raise that, or lower max_pushes"),
        ({"ingest": 33}, "less than or equal to 32"),
        ({"ingest": -1}, "greater than or equal to 0"),
    ],
)
def test_ingest_processes_without_room_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        _made(**values)
