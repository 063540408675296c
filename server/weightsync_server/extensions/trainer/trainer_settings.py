"""The settings of a server that supervises a trainer, and what that trainer's process inherits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightsync import failpoints
from weightsync_server.auth import Endpoint, Role
from weightsync_server.ops.disk_watch import DataFolder
from weightsync_server.ops.settings_group import setting

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _check_class(trainer: str) -> str:
    if trainer and not _CLASS.fullmatch(trainer):
        raise ValueError(f"trainer must be module:Class, such as tune:Tuner, not {trainer!r}")
    return trainer


def _check_python(path: Path | None) -> Path | None:
    if path is not None and not (path.is_file() and os.access(path, os.X_OK)):
        raise ValueError(f"{path} is not an executable; name a Python interpreter")
    return path


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of trainers in place; a server without `trainer` supervises none.

    `supervised_trainer` fills in what is no setting of its own: `address` is where it attaches,
    `states` the folder of the states of its optimizer, `identity` that of the server.
    """

    trainer: str = setting(
        "",
        "module:Class of a trainer that this server starts, supervises and sends jobs to; it "
        "trains in the memory of an engine. Empty: none.",
        check=_check_class,
    )
    python: Path | None = setting(
        None,
        "Python that runs the trainer; weightsync's client must be installed in it. Default: the "
        "server's Python.",
        name="trainer_python",
        check=_check_python,
    )
    engine: str = setting(
        "", "Name of the engine that it trains in; empty: the only engine.", name="trainer_engine"
    )
    queue: int = setting(
        16,
        "Jobs that may wait behind the running job; more are refused.",
        name="trainer_queue",
        ge=0,
        le=1024,
    )
    start_timeout_s: float = setting(
        300,
        "Longest start of the trainer, with its setup, in seconds.",
        name="trainer_start_timeout_s",
        gt=0,
    )
    silence_s: float = setting(
        60,
        "Seconds without a sign of life after which the trainer is killed: it is frozen, or its "
        "code holds Python's lock.",
        name="trainer_silence_s",
        gt=0,
    )
    grace_s: float = setting(
        10,
        "Seconds that a cancelled job gets to end; then its process is killed and restarted.",
        name="trainer_grace_s",
        ge=0,
    )
    checkpoint_dir: Path | None = setting(
        None, "Folder below which Checkpoint writes folders. Unset: it writes none."
    )
    checkpoint_folders: int = setting(
        16,
        "Checkpoint folders to keep: beyond that the oldest is removed, unless it was changed. 0: "
        "keep all.",
        ge=0,
    )
    address: str = ""
    states: Path = Path()
    model: str = ""
    identity: str = ""

    def check(self, fleet: str, origin: str, engines: Sequence[str]) -> None:
        """Refuse with ValueError a trainer where what it writes could never be served."""
        if not self.trainer:
            alone = {
                "--checkpoint-dir": self.checkpoint_dir,
                "--trainer-python": self.python,
                "--trainer-engine": self.engine,
            }
            for flag, given in alone.items():
                if given:
                    raise ValueError(
                        f"add --trainer module:Class, or leave {flag} out: it only affects a "
                        "trainer"
                    )
            return
        if fleet:
            raise ValueError("leave out trainer or fleet: the fleet decides what its members serve")
        if origin:
            raise ValueError(
                "give --trainer to the server that is followed, or to the head: this server "
                "takes its versions from another one"
            )
        if list(engines) == ["none"]:
            raise ValueError("trainer needs an engine to train in; name one with --engine")
        if len(engines) > 1 and not self.engine:
            raise ValueError("there are several engines; name the trainer's with --trainer-engine")

    def endpoints(self, run_dir: Path) -> list[Endpoint]:
        """Return where the trainer attaches: at a socket of its own."""
        own = Endpoint(f"unix:{(run_dir / 'trainer.sock').absolute()}", Role.TRAIN, private=True)
        return [own] if self.trainer else []

    def folders(self) -> list[DataFolder]:
        below = self.checkpoint_dir
        return [DataFolder("checkpoints", below.absolute())] if below is not None else []


#: Our own settings, and those of clouds, of which not every name says that it is a secret.
_OURS_AND_CLOUDS = ("WEIGHTSYNC_", "AWS_", "AZURE_", "GOOGLE_", "GCS_")
#: Words of names whose values prove something to somebody.
_SECRET = frozenset(
    {"AUTH", "AUTHORIZATION", "CREDENTIAL", "CREDENTIALS", "KEY", "KEYS", "PASS", "PASSWD"}
    | {"PASSPHRASE", "PASSWORD", "PAT", "SECRET", "SECRETS", "TOKEN", "TOKENS", "APIKEY"}
)


def trainer_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the server's variables without its settings, tokens, keys and passwords."""
    return {name: value for name, value in variables.items() if not _is_secret(name)}


def _is_secret(name: str) -> bool:
    if name == failpoints.VARIABLE:
        return False
    plain = name.upper()
    return plain.startswith(_OURS_AND_CLOUDS) or bool(_SECRET & set(re.split(r"[^A-Z]+", plain)))
