"""What each part of a server is given of its settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from weightsync.model.manifest import MAX_VERSION
from weightsync_server.auth import Endpoint, ListenerOptions, Role
from weightsync_server.catalog.retention import Retention
from weightsync_server.deltas import ChainLimits
from weightsync_server.engine import ApplyLimits
from weightsync_server.engines import EngineOptions
from weightsync_server.fleet_host.fleet_service import FleetOptions
from weightsync_server.follow.start import FollowOptions
from weightsync_server.model import ModelLimits
from weightsync_server.ops.disk_watch import DataFolder
from weightsync_server.push import PushLimits
from weightsync_server.register.etcd_tls import EtcdTls
from weightsync_server.rpc.rate_limits import CallLimits
from weightsync_server.train.train_options import TrainOptions

if TYPE_CHECKING:
    from weightsync_server.settings import Settings

__all__ = [
    "STORE",
    "apply_limits",
    "attach_socket",
    "call_limits",
    "data_folders",
    "engine_options",
    "fleet_options",
    "follow_options",
    "listener_options",
    "model_limits",
    "push_limits",
    "train_options",
]

#: The folder of versions, among those that are looked at.
STORE = "store"
#: Where vLLM's processes share memory; one that is full ends them.
_SHM = Path("/dev/shm")  # noqa: S108 - it is looked at, and nothing is written there
#: The engine's checkpoint is the first version, whatever is pushed before the engine is up.
CHECKPOINT_VERSION = 1


def push_limits(settings: Settings) -> PushLimits:
    """Return how much pushes may take."""
    return PushLimits(
        max_pushes=settings.max_pushes,
        # An origin has decided already which number its version gets.
        max_version_jump=settings.max_version_jump if not settings.follow else MAX_VERSION,
        stream_idle_timeout_s=settings.push_idle_timeout_s,
        resume_timeout_s=settings.push_resume_timeout_s,
        writer_timeout_s=settings.push_writer_timeout_s,
    )


def model_limits(settings: Settings) -> ModelLimits:
    """Return how much a model may take."""
    return ModelLimits(
        slots=settings.slots,
        retention=Retention(settings.retain_versions, settings.retain_bytes),
        chains=ChainLimits(settings.delta_chain_length, settings.delta_chain_share),
        disk_floor_bytes=settings.disk_floor_bytes,
        reserved_version=CHECKPOINT_VERSION,
    )


def data_folders(settings: Settings, store: str) -> list[DataFolder]:
    """Return what is written to and may fill up.

    Args:
        settings: All.
        store: URL of the opened store, of which a folder of this host may fill up.
    """
    folders = [DataFolder("state", settings.state_dir.absolute())]
    if store.startswith("file:"):
        path = Path(unquote(urlsplit(store).path))
        folders.insert(0, DataFolder(STORE, path, settings.disk_floor_bytes))
    if settings.checkpoint_dir is not None:
        folders.append(DataFolder("checkpoints", settings.checkpoint_dir.absolute()))
    if _SHM.is_dir():
        folders.append(DataFolder("shm", _SHM))
    return folders


def follow_options(settings: Settings) -> FollowOptions:
    """Return what is followed, and how."""
    return FollowOptions(
        settings.follow,
        settings.follow_interval_s,
        settings.follow_ca,
        settings.follow_cert,
        settings.follow_key,
        settings.follow_token_file,
        settings.slots,
        settings.disk_floor_bytes,
        settings.follow_cache,
    )


def fleet_options(settings: Settings) -> FleetOptions | None:
    """Return to which fleet this server belongs; None: to none."""
    if not settings.fleet:
        return None
    files = settings.fleet_ca, settings.fleet_cert, settings.fleet_key
    return FleetOptions(
        settings.fleet,
        settings.fleet_register,
        EtcdTls(*files) if any(files) else None,
        settings.fleet_member,
        settings.fleet_limits,
        settings.max_unavailable,
        settings.state_dir / "fleet.json",
        bool(settings.follow),
    )


def apply_limits(settings: Settings) -> ApplyLimits:
    """Return how long applies may take."""
    return ApplyLimits(
        prepare_timeout_s=settings.prepare_timeout_s,
        commit_timeout_s=settings.commit_timeout_s,
        pause_lease_s=settings.pause_lease_s,
        in_place_pause_s=settings.in_place_pause_s,
        read_ahead=settings.read_ahead,
    )


def attach_socket(settings: Settings) -> Path:
    """Return the path at which trainers get live parameters."""
    return settings.segment_socket.with_name("attach.sock")


def listener_options(settings: Settings) -> ListenerOptions:
    """Return what the listeners need to know, that of a supervised trainer included."""
    options = settings.listener_options
    if not settings.trainer:
        return options
    own = Endpoint(_trainer_address(settings), Role.TRAIN, private=True)
    return replace(options, endpoints=[*options.endpoints, own])


def _trainer_address(settings: Settings) -> str:
    return f"unix:{settings.segment_socket.with_name('trainer.sock').absolute()}"


def train_options(settings: Settings, identity: str) -> TrainOptions | None:
    """Return which trainer is supervised; None: there is none.

    Args:
        settings: All.
        identity: Of this server.
    """
    if not settings.trainer:
        return None
    below = settings.checkpoint_dir
    return TrainOptions(
        trainer=settings.trainer,
        python=settings.trainer_python,
        model=settings.name,
        engine=settings.trainer_engine,
        address=_trainer_address(settings),
        states=(settings.state_dir / "trainer").absolute(),
        checkpoints=below.absolute() if below is not None else None,
        checkpoint_folders=settings.checkpoint_folders,
        identity=identity,
        queue=settings.trainer_queue,
        start_timeout_s=settings.trainer_start_timeout_s,
        silence_s=settings.trainer_silence_s,
        grace_s=settings.trainer_grace_s,
        log_level=settings.log_level,
    )


def engine_options(settings: Settings, engine_args: tuple[str, ...]) -> EngineOptions:
    """Return which engines there are, and what is given to one that this process hosts."""
    own = [settings.segment_socket, settings.lending_socket, settings.ingest_socket]
    return EngineOptions(
        settings.engine_names,
        settings.engines,
        [*own, attach_socket(settings), settings.segment_socket.with_name("trainer.sock")],
        settings.model,
        settings.ranks,
        engine_args,
    )


def call_limits(settings: Settings) -> CallLimits:
    """Return how many calls are let in."""
    return CallLimits(
        calls_per_s=settings.max_calls_per_s,
        streams=settings.max_streams,
        pulls=settings.max_pulls,
        watches=settings.max_watches,
    )
