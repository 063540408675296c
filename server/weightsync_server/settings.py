"""Every setting of the server: one field each, a flag and an environment variable alike."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from weightsync.wire.addresses import is_loopback, is_private
from weightsync_server.auth import Endpoint, ListenerOptions
from weightsync_server.engine.engine_names import check_engines
from weightsync_server.fleet_host.fleet_settings import FleetSettings
from weightsync_server.follow.follow_settings import FollowSettings
from weightsync_server.follow.follow_url import check_follow
from weightsync_server.node_host.node_url import check_node
from weightsync_server.store.protocol import MODEL_NAME
from weightsync_server.train.train_settings import TrainSettings, check_trainer

__all__ = ["Settings"]

_MAX_PORT = 65535
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _several(written: Any) -> Any:
    """Return the values of a text: between commas, where a JSON list may stand for some of them."""
    if not isinstance(written, str):
        return written
    values: list[Any] = []
    while written := written.lstrip(" ,"):
        some, written = _first(written)
        values += some
    return values


def _first(written: str) -> tuple[list[Any], str]:
    """Return the values that a text begins with, and what comes after them."""
    # A host of IPv6 begins with a bracket, too.
    if written.startswith("["):
        try:
            some, end = json.JSONDecoder().raw_decode(written)
        except ValueError:
            pass
        else:
            rest = written[end:].lstrip()
            if not rest or rest.startswith(","):
                return some, rest
    value, _, rest = written.partition(",")
    return [value.rstrip()], rest


#: A setting of several values; all its flags arrive as one text, with commas between them.
_Several = Annotated[list[str], NoDecode, BeforeValidator(_several)]


def _check_host_port(name: str, written: str, example: int) -> None:
    _, colon, port = written.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > _MAX_PORT:
        raise ValueError(f"{name} must be HOST:PORT, such as 127.0.0.1:{example}, not {written!r}")


class Settings(FleetSettings, FollowSettings, TrainSettings, BaseSettings):
    """Settings of weightsync-server: flags win over WEIGHTSYNC_* variables.

    A setting of several values takes its flag several times, or commas between them, or a JSON
    list; its variable the latter two. With the embedded engine, everything after `--` is passed to
    vLLM. `weightsync-server --version` prints the version, `weightsync-server token new` a token.
    """

    model_config = SettingsConfigDict(
        env_prefix="WEIGHTSYNC_",
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_prog_name="weightsync-server",
        cli_implicit_flags=True,
    )

    name: str = Field("default", description="Name of the model that clients use.")
    engine: _Several = Field(
        [],
        description="unix:PATH of the bridge in vLLM, of several engines several; 'embedded' to "
        "host vLLM in this process, 'memory' for an engine without vLLM that generates nothing: "
        "for tests of trainers; or 'none'. Default: unix:/run/weightsync/engine.sock, and none "
        "where engines names a folder.",
    )
    engines: Path | None = Field(
        None, description="Folder of engines that come and go: each NAME.sock in it is a bridge's."
    )
    model: str = Field(
        "",
        description="Embedded engine: model directory or name for vLLM. Engine 'memory': a "
        "safetensors file, or a folder of them.",
    )
    ranks: int = Field(1, ge=1, le=64, description="Engine 'memory': ranks, each with the model.")
    listen: _Several = Field(
        ["127.0.0.1:50551"],
        description="gRPC addresses: HOST:PORT, unix:PATH, or unix:PATH?role=ROLE, a socket that "
        "gives ROLE (push, train, apply, read, follow, member, fleet or admin) to whoever may open "
        "it. Other hosts can reach an address only with TLS and an authority file.",
    )
    authority: Path | None = Field(
        None,
        description="TOML or JSON file of who may do what; read again when it changes. None: "
        "whoever can connect, from this host, may do everything.",
    )
    tls_cert: Path | None = Field(
        None, description="Certificate chain, PEM: TLS on every TCP address. Read again on change."
    )
    tls_key: Path | None = Field(None, description="Its key, PEM, no password.")
    tls_client_ca: Path | None = Field(
        None, description="PEM: only clients with a certificate of these authorities may connect."
    )
    run_dir: Path = Field(
        Path("/run/weightsync"), description="Folder of the segment socket, shared with vLLM."
    )
    state_dir: Path = Field(
        Path("/var/lib/weightsync"),
        description="Folder of the lock and the journal, this host's own.",
    )
    store: str = Field(
        "",
        description="Where versions are kept: file:///PATH, s3://BUCKET/PREFIX, gs://..., az://... "
        "or memory://. Default: state_dir/store.",
    )
    metrics: str = Field(
        "127.0.0.1:9551", description="HOST:PORT of /metrics; port 0: any; empty: none."
    )
    metrics_open: bool = Field(
        False,
        description="Let other hosts read /metrics, in plain text and without being asked who they "
        "are; --metrics then names an address that they reach.",
    )
    http: str = Field(
        "",
        description="HOST:PORT of vLLM's HTTP verbs (/pause, /update_weights, /resume, /health), "
        "for trainers and scripts that post checkpoint folders; port 0: any; empty: none. TLS and "
        "authority are those of listen.",
    )
    import_dir: _Several = Field(
        [],
        description="Folders below which the folder that /update_weights names must lie; no link "
        "is followed from there on.",
    )
    slots: int = Field(
        2, ge=2, le=16, description="Versions held in memory. 3: rollback is instant."
    )
    memory_bytes: int = Field(
        0,
        ge=0,
        description="Most shared memory for segments; 0: 80 % of what is available at start.",
    )
    disk_floor_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Free space of the store's disk that pushes leave to journal and records.",
    )
    fetchers: int = Field(
        default_factory=lambda: min(16, max(2, len(os.sched_getaffinity(0)) * 5 // 8)),
        ge=1,
        le=64,
        description="Processes that digest and write shards. Default: 5/8 of the cores, 2 to 16.",
    )
    ingest: int = Field(
        0,
        ge=0,
        le=32,
        description="Processes that receive what pushes send, each on addresses of its own: the "
        "ports after that of each HOST:PORT, and unix:PATH.1 and so on. 0: the server's own "
        "process receives.",
    )
    node_of: str = Field(
        "",
        description="grpc://HOST:PORT or grpcs://HOST:PORT of the server beside the first node of "
        "an engine whose ranks are on several (vLLM's --nnodes): this one stages for those beside "
        "it and does nothing else. --follow-ca, -cert, -key and -token-file are for the head then.",
    )
    node_rank: int = Field(0, ge=0, description="With node_of: vLLM's --node-rank here, from 1.")
    retain_versions: int = Field(8, ge=2, description="Committed versions kept in the store.")
    retain_bytes: int = Field(0, ge=0, description="Bytes kept in the store; 0: no limit.")
    delta_chain_length: int = Field(
        32, ge=1, description="Deltas in a row before a version is kept in full in the background."
    )
    delta_chain_share: float = Field(
        0.5, gt=0, description="The same for their bytes, as a share of those of a whole version."
    )
    scrub_bytes_per_s: int = Field(
        32 << 20, ge=0, description="How fast stored versions are checked for damage; 0: never."
    )
    max_version_jump: int = Field(
        1_000_000, ge=1, description="Most that a version may lie above the newest one."
    )
    push_idle_timeout_s: float = Field(
        60,
        gt=0,
        description="Seconds without a message, or heartbeat, after which a stream is ended.",
    )
    push_resume_timeout_s: float = Field(
        600,
        gt=0,
        description="Seconds without a stream after which an open push is dropped; after a "
        "twentieth of them it gives its slot back, unless the store is memory://.",
    )
    push_writer_timeout_s: float = Field(
        60,
        gt=0,
        description="Seconds for which one of several writers of a push may stay away or bring "
        "nothing; then the push is dropped for all of them.",
    )
    reader_timeout_s: float = Field(
        10, gt=0, description="Seconds that a reader may take for one message of a stream."
    )
    same_host: bool = Field(
        True,
        description="Lend the memory of a push to a trainer on this host, which writes its tensors "
        "there in place of sending them.",
    )
    same_host_socket: Path | None = Field(
        None,
        description="Unix socket of that; its owner and mode say which users may. Default: "
        "trainers.sock in run_dir.",
    )
    max_pushes: int = Field(
        4, ge=1, description="Pushes open at once, shared out when several callers push."
    )
    max_streams: int = Field(32, ge=1, description="PushWeights streams at once, of all pushes.")
    max_pulls: int = Field(16, ge=1, description="PullWeights streams at once.")
    max_watches: int = Field(
        64, ge=1, description="Other streams at once, such as WatchVersions and health watches."
    )
    max_calls: int = Field(1024, ge=16, description="Calls at once, of every kind.")
    max_calls_per_s: float = Field(
        500, ge=1, description="Calls per second of one caller; twice as many may come at once."
    )
    max_connections: int = Field(512, ge=1, description="Connections at once to each address.")
    read_ahead: bool = Field(
        True,
        description="Have GPUs read the shards of a version as they come in, so that its apply has "
        "little left to do; false: each version is read when it is applied.",
    )
    prepare_timeout_s: float = Field(300, gt=0, description="Longest prepare of an apply, seconds.")
    commit_timeout_s: float = Field(
        60, gt=0, description="Longest commit of an apply, seconds; then the engine is fenced."
    )
    pause_lease_s: float = Field(
        15,
        gt=0.5,
        description="Seconds after which a pause ends by itself when this server is gone, and in "
        "which vLLM must stop and start; longer than its longest step.",
    )
    drain_timeout_s: float = Field(
        30, ge=0, description="Seconds that calls get to finish after SIGTERM."
    )
    stop_timeout_s: float = Field(
        10,
        gt=0,
        description="Seconds that all else gets to stop after that; then the process ends anyway, "
        "with exit code 4.",
    )
    reflection: bool = Field(True, description="Serve gRPC reflection.")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING, ERROR or CRITICAL.")

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not MODEL_NAME.fullmatch(value):
            raise ValueError(f"name must match {MODEL_NAME.pattern}")
        return value

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: list[str]) -> list[str]:
        sockets = set()
        for address in value:
            socket = Endpoint.parse(address).address
            if socket in sockets and socket.startswith("unix:"):
                raise ValueError(f"{socket} is named twice; give each role a path of its own")
            sockets.add(socket)
        if not value:
            raise ValueError("name at least one address to listen on")
        return value

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, value: list[str]) -> list[str]:
        check_engines(value)
        return value

    @field_validator("log_level")
    @classmethod
    def _check_log_level(cls, value: str) -> str:
        if value.upper() not in _LEVELS:
            raise ValueError(f"must be {', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}, not {value!r}")
        return value.upper()

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if bool(self.model) != bool({"embedded", "memory"} & set(self.engine)):
            raise ValueError(
                "model names what --engine embedded or memory loads: give both or neither"
            )
        if self.engines and self.engine and self.engine != ["none"]:
            raise ValueError("engines names a folder of engines: give that, or engine, not both")
        if self.ranks > 1 and self.engine != ["memory"]:
            raise ValueError("ranks are those of --engine memory; vLLM's come from its own flags")
        return self

    @model_validator(mode="after")
    def _check_authority(self) -> Self:
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_client_ca and not self.tls_cert):
            raise ValueError("tls_cert and tls_key go together, and tls_client_ca needs both")
        for endpoint in [*self.endpoints, *self.http_endpoints]:
            if is_private(endpoint.address):
                continue
            if not self.tls_cert:
                raise ValueError(
                    f"{endpoint.address} can be reached from other hosts; give --tls-cert and "
                    "--tls-key, or listen on 127.0.0.1:PORT or unix:PATH"
                )
            if not self.authority:
                raise ValueError(
                    f"{endpoint.address} can be reached from other hosts and nobody is asked who "
                    "calls; give --authority FILE with tokens or certificate names"
                )
        return self

    @model_validator(mode="after")
    def _check_follow(self) -> Self:
        files = self.follow_cert, self.follow_key, self.follow_token_file
        ca, origin = bool(self.follow_ca), self.follow or self.node_of
        check_node(self.node_of, self.node_rank, self.follow, ca=ca)
        check_follow(origin, self.store, ca=ca, others=any(files))
        return self

    @model_validator(mode="after")
    def _check_trainer(self) -> Self:
        check_trainer(self, self.fleet, self.follow or self.node_of, self.engine)
        return self

    @model_validator(mode="after")
    def _check_ingest(self) -> Self:
        if self.ingest * self.max_pushes > self.max_streams:
            raise ValueError(
                f"{self.max_pushes} pushes with a stream to each of {self.ingest} ingest processes "
                f"are more than max_streams ({self.max_streams}); raise that, or lower max_pushes"
            )
        if self.ingest and not any(endpoint.takes_pushes for endpoint in self.endpoints):
            raise ValueError(
                "no address takes pushes, so ingest processes have nothing to do; give --ingest 0"
            )
        taken = {endpoint.address for endpoint in self.endpoints}
        for place in range(self.ingest):
            for endpoint in self.data_endpoints(place):
                if endpoint.address in taken and not endpoint.address.endswith(":0"):
                    raise ValueError(
                        f"an ingest process would listen on {endpoint.address}, which is named "
                        "already; leave room after each port that --listen names"
                    )
                taken.add(endpoint.address)
        return self

    @field_validator("http")
    @classmethod
    def _check_http(cls, value: str) -> str:
        if value:
            _check_host_port("http", value, 8551)
        return value

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        if not self.metrics:
            return self
        _check_host_port("metrics", self.metrics, 9551)
        host = self.metrics.rpartition(":")[0]
        if not self.metrics_open and not is_loopback(host):
            raise ValueError(
                f"{self.metrics} can be reached from other hosts and /metrics asks nobody who "
                "reads; give --metrics-open where a firewall or network policy keeps strangers "
                "out, or --metrics 127.0.0.1:PORT"
            )
        return self

    @property
    def engine_names(self) -> list[str]:
        """Engines that are named, default filled in."""
        return self.engine or ([] if self.engines else ["unix:/run/weightsync/engine.sock"])

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where to listen, and what each socket stands for."""
        return [Endpoint.parse(address) for address in self.listen]

    @property
    def http_endpoints(self) -> list[Endpoint]:
        """Where the HTTP verbs are; none: nowhere."""
        return [Endpoint(self.http)] if self.http else []

    @property
    def import_folders(self) -> list[Path]:
        """Folders below which checkpoints may be imported, absolute."""
        return [Path(folder).absolute() for folder in self.import_dir]

    def data_endpoints(self, place: int) -> list[Endpoint]:
        """Return where an ingest process listens.

        Args:
            place: Its number, from 0.

        Raises:
            ValueError: An address leaves no room for it.
        """
        return [one.ingest_endpoint(place + 1) for one in self.endpoints if one.takes_pushes]

    @property
    def listener_options(self) -> ListenerOptions:
        """What the listeners of `endpoints` need to know."""
        return ListenerOptions(
            self.name,
            self.endpoints,
            self.max_connections,
            self.max_calls,
            self.authority,
            self.tls_cert,
            self.tls_key,
            self.tls_client_ca,
        )

    @property
    def store_url(self) -> str:
        """Where versions are kept, default filled in."""
        return self.store or f"file://{(self.state_dir / 'store').absolute()}"

    @property
    def lending_socket(self) -> Path:
        """Path of the lending socket, default filled in."""
        return (self.same_host_socket or self.run_dir / "trainers.sock").absolute()

    @property
    def ingest_socket(self) -> Path:
        """Path of the socket at which ingest processes speak with this one."""
        return (self.run_dir / "ingest.sock").absolute()

    @property
    def segment_socket(self) -> Path:
        """Path of the segment socket."""
        return self.run_dir / "segments.sock"
