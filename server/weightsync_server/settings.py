"""The tree of settings: the server's own, and the group of each room."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from weightsync import host_dirs, log_lines
from weightsync.wire.grpc_channels import is_loopback
from weightsync_server.auth import Endpoint, ListenerSettings
from weightsync_server.engine import ApplySettings
from weightsync_server.engine.served_engines import ServedEngines
from weightsync_server.fleet.fleet_settings import FleetSettings
from weightsync_server.http.extension_points import ExtensionSettings
from weightsync_server.http.known_hosts import check_names
from weightsync_server.model import ModelSettings
from weightsync_server.ops.disk_watch import DataFolder
from weightsync_server.ops.settings_group import setting
from weightsync_server.push import PushSettings
from weightsync_server.replicate.replica_settings import ReplicaSettings, check_cache
from weightsync_server.store.protocol import MODEL_NAME
from weightsync_server.usecases.rate_limits import CallSettings

_MAX_PORT = 65535
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
#: The folder of versions, among those that are looked at.
STORE = "store"
#: Where vLLM's processes share memory; one that is full ends them.
_SHM = Path("/dev/shm")  # noqa: S108 - it is looked at, and nothing is written there


def _check_host_port(name: str, written: str, example: int) -> None:
    _, colon, port = written.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > _MAX_PORT:
        raise ValueError(f"{name} must be HOST:PORT, such as 127.0.0.1:{example}, not {written!r}")


def _check_name(name: str) -> str:
    if not MODEL_NAME.fullmatch(name):
        raise ValueError(f"name must match {MODEL_NAME.pattern}")
    return name


def _check_http(address: str) -> str:
    if address:
        _check_host_port("http", address, 8551)
    return address


def _check_log_format(form: str) -> str:
    if form.lower() not in (log_lines.TEXT, log_lines.JSON):
        raise ValueError(f"must be {log_lines.TEXT} or {log_lines.JSON}, not {form!r}")
    return form.lower()


def _check_log_level(level: str) -> str:
    if level.upper() not in _LEVELS:
        raise ValueError(f"must be {', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}, not {level!r}")
    return level.upper()


@dataclass(frozen=True)
class ServerPaths:
    """Where the server keeps what, and where others on its host find it."""

    run_dir: Path = setting(
        None,
        "Folder of the sockets shared with vLLM. Default: /run/weightsync for root and users who "
        "can write there, else $XDG_RUNTIME_DIR/weightsync or /tmp/weightsync-UID.",
        default_factory=host_dirs.run_dir,
    )
    state_dir: Path = setting(
        None,
        "Folder of this host's lock and journal. Default: /var/lib/weightsync for root and users "
        "who can write there, else $XDG_STATE_HOME/weightsync or ~/.local/state/weightsync.",
        default_factory=host_dirs.state_dir,
    )
    store: str = setting(
        "",
        "Where versions are kept: file:///PATH, s3://BUCKET/PREFIX, gs://..., az://... or "
        "memory://. Default: state_dir/store.",
    )
    same_host_socket: Path | None = setting(
        None,
        "Unix socket for same_host; its owner and mode decide which users may. Default: "
        "trainers.sock in run_dir.",
    )

    @property
    def store_url(self) -> str:
        return self.store or f"file://{(self.state_dir / 'store').absolute()}"

    @property
    def segment_socket(self) -> Path:
        return self.run_dir / "segments.sock"

    @property
    def attach_socket(self) -> Path:
        return self.run_dir / "attach.sock"

    @property
    def trainers_socket(self) -> Path:
        return (self.same_host_socket or self.run_dir / "trainers.sock").absolute()

    @property
    def ingest_socket(self) -> Path:
        return (self.run_dir / "ingest.sock").absolute()

    @property
    def own_sockets(self) -> list[Path]:
        """All of them, that of a supervised trainer included."""
        others = [self.trainers_socket, self.ingest_socket, self.run_dir / "trainer.sock"]
        return [self.segment_socket, self.attach_socket, *others]


@dataclass(frozen=True)
class Settings:
    """All settings, as `check` has found them good; rooms get theirs from who made them."""

    paths: ServerPaths
    listeners: ListenerSettings
    calls: CallSettings
    model: ModelSettings
    push: PushSettings
    engines: ServedEngines
    apply: ApplySettings
    fleet: FleetSettings
    replica: ReplicaSettings
    name: str = setting("default", "Name of the model, for clients.", check=_check_name)
    metrics: str = setting(
        "127.0.0.1:9551", "HOST:PORT of /metrics; port 0: any free port; empty: off."
    )
    metrics_open: bool = setting(
        False,
        "Let other hosts read /metrics, in plain text and without authentication; --metrics must "
        "then name an address that they can reach.",
    )
    http: str = setting(
        "",
        "HOST:PORT of the status page and of vLLM's HTTP verbs (/pause, /update_weights, /resume, "
        "/health), for trainers and scripts that post checkpoint folders; port 0: any free port; "
        "empty: off. TLS and authority are those of listen.",
        check=_check_http,
    )
    host_names: list[str] = setting(
        [],
        "Names of this server by which --metrics, and --http without an authority file, are "
        "answered, beside IP addresses and localhost; .example.com: all names below it. For a "
        "Prometheus that scrapes by a DNS name.",
        check=check_names,
    )
    import_dir: list[str] = setting(
        [],
        "Folders below which /update_weights may name a folder; links below them are not followed.",
    )
    memory_bytes: int = setting(
        0, "Limit of shared memory for segments; 0: 80 % of what is available at start.", ge=0
    )
    fetchers: int = setting(
        None,
        "Processes that digest and write shards. Default: 5/8 of the cores, 2 to 16.",
        default_factory=lambda: min(16, max(2, len(os.sched_getaffinity(0)) * 5 // 8)),
        ge=1,
        le=64,
    )
    ingest: int = setting(
        0,
        "Processes that receive pushes, each on its own addresses: the ports after that of each "
        "HOST:PORT, and unix:PATH.1 and so on. 0: the server's own process receives.",
        ge=0,
        le=32,
    )
    scrub_bytes_per_s: int = setting(
        32 << 20,
        "Rate of the check of stored versions for damage, in bytes per second; 0: off.",
        ge=0,
    )
    same_host: bool = setting(
        True,
        "Let a trainer on this host write its tensors into the memory of a push instead of "
        "sending them.",
    )
    drain_timeout_s: float = setting(30, "Seconds that calls get to finish after SIGTERM.", ge=0)
    stop_timeout_s: float = setting(
        10,
        "Seconds that everything else then gets to stop; after that the process exits anyway, "
        "with code 4.",
        gt=0,
    )
    reflection: bool = setting(True, "Serve gRPC reflection.")
    log_level: str = setting(
        "INFO", "DEBUG, INFO, WARNING, ERROR or CRITICAL.", check=_check_log_level
    )
    log_format: str = setting(
        log_lines.TEXT,
        "text, or json: one JSON object for each event, on one line.",
        check=_check_log_format,
    )
    traces: bool = setting(
        False,
        "Send a trace of each version to the OTLP collector that OpenTelemetry's variables "
        "(OTEL_...) name.",
    )
    extensions: Sequence[ExtensionSettings] = ()

    def check(self) -> None:
        """Refuse with ValueError what does not go together."""
        replica, engines = self.replica, self.engines
        check_cache(replica.cache, replica.url)
        self.fleet.check()
        engines.check()
        self.listeners.check(self.http_endpoints)
        replica.check(self.paths.store)
        for extension in self.extensions:
            extension.check(self.fleet.fleet, replica.url or replica.head, engines.given)
        self._check_ingest()
        self._check_metrics()

    def _check_ingest(self) -> None:
        pushes, streams = self.push.max_pushes, self.calls.streams
        if self.ingest * pushes > streams:
            raise ValueError(
                f"{pushes} pushes with a stream to each of {self.ingest} ingest processes are more "
                f"than max_streams ({streams}); raise that, or lower max_pushes"
            )
        endpoints = self.listeners.endpoints
        if self.ingest and not any(endpoint.takes_pushes for endpoint in endpoints):
            raise ValueError(
                "no address takes pushes, so ingest processes have nothing to do; give --ingest 0"
            )
        taken = {endpoint.address for endpoint in endpoints}
        for place in range(self.ingest):
            for endpoint in self.listeners.of_ingest(place):
                if endpoint.address in taken and not endpoint.address.endswith(":0"):
                    raise ValueError(
                        "leave the ports after each port of --listen free: an ingest process "
                        f"would listen on {endpoint.address}, which is already in use by another "
                        "setting"
                    )
                taken.add(endpoint.address)

    def _check_metrics(self) -> None:
        if not self.metrics:
            return
        _check_host_port("metrics", self.metrics, 9551)
        if not self.metrics_open and not is_loopback(self.metrics.rpartition(":")[0]):
            raise ValueError(
                f"{self.metrics} can be reached from other hosts, and /metrics has no "
                "authentication; give --metrics-open where a firewall or network policy limits "
                "who can reach it, or --metrics 127.0.0.1:PORT"
            )

    @property
    def http_endpoints(self) -> list[Endpoint]:
        return [Endpoint(self.http)] if self.http else []

    @property
    def extra_endpoints(self) -> list[Endpoint]:
        """Where the server listens for extensions."""
        return [one for group in self.extensions for one in group.endpoints(self.paths.run_dir)]

    @property
    def import_folders(self) -> list[Path]:
        return [Path(folder).absolute() for folder in self.import_dir]

    def data_folders(self, store: str) -> Iterator[DataFolder]:
        """Yield what may fill up on this host; `store` is the URL of the opened store."""
        if store.startswith("file:"):
            path = Path(unquote(urlsplit(store).path))
            yield DataFolder(STORE, path, self.model.disk_floor_bytes)
        yield DataFolder("state", self.paths.state_dir.absolute())
        for extension in self.extensions:
            yield from extension.folders()
        if _SHM.is_dir():
            yield DataFolder("shm", _SHM)
