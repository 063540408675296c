"""Settings of a trainer that are refused, each with what helps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from weightsync_server.extensions.trainer.trainer_settings import TrainerSettings
from weightsync_server.flags import Flags
from weightsync_server.settings import Settings


def _made(**values: Any) -> Settings:
    return Flags(**values).tree


def _own(settings: Settings) -> TrainerSettings:
    (own,) = (one for one in settings.extensions if isinstance(one, TrainerSettings))
    return own


def test_a_trainer_has_a_socket_of_its_own() -> None:
    settings = _made(trainer="tune:Tuner", trainer_python=sys.executable, run_dir="/run/w")
    (own,) = settings.extra_endpoints
    assert (str(own), own.private) == ("unix:/run/w/trainer.sock?role=train", True)
    options = _own(settings)
    assert (options.trainer, options.endpoints(Path("/run/w"))) == ("tune:Tuner", [own])
    assert settings.paths.state_dir / "trainer" == Path("/var/lib/weightsync/trainer")
    # The processes that receive pushes do not listen there.
    assert all("trainer.sock" not in str(one) for one in settings.listeners.endpoints)


def test_without_one_there_is_none() -> None:
    settings = _made()
    assert settings.extra_endpoints == []
    assert _own(settings) == TrainerSettings()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"trainer": "tune"}, "must be module:Class"),
        ({"trainer": "tune.py:Tuner()"}, "must be module:Class"),
        ({"trainer": "a:B", "trainer_python": "/nowhere/python"}, "is not an executable"),
        ({"trainer": "a:B", "trainer_queue": -1}, "greater than or equal to 0"),
        ({"trainer": "a:B", "trainer_silence_s": 0}, "greater than 0"),
        ({"checkpoint_dir": "/x"}, "add --trainer module:Class, or leave --checkpoint-dir out"),
        ({"trainer_engine": "a"}, "add --trainer module:Class, or leave --trainer-engine out"),
        ({"trainer": "a:B", "engine": ["none"]}, "needs an engine"),
        ({"trainer": "a:B", "engine": ["unix:/a", "unix:/b"]}, "--trainer-engine"),
        ({"trainer": "a:B", "follow": "grpc://127.0.0.1:1"}, "to the server that is followed"),
        (
            {"trainer": "a:B", "fleet": "f", "fleet_register": "file:///r"},
            "leave out trainer or fleet",
        ),
    ],
)
def test_what_can_never_work_is_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        _made(**values)


def test_of_several_engines_one_is_named() -> None:
    engines = ["unix:/run/a.sock", "unix:/run/b.sock"]
    options = _own(_made(trainer="a:B", engine=engines, trainer_engine="a"))
    assert options.engine == "a"
