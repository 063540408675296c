"""The class that --trainer names."""

from __future__ import annotations

import pytest

from tests.support.adding_trainer import AddingTrainer
from weightsync_client.trainer.trainer_process import import_class


def test_it_is_found_by_its_name() -> None:
    assert import_class("tests.support.adding_trainer:AddingTrainer") is AddingTrainer


@pytest.mark.parametrize("named", ["pathlib:Path", "json:loads", "json:Nothing"])
def test_what_is_no_trainer_is_refused(named: str) -> None:
    with pytest.raises(TypeError, match=r"has no class \w+ with setup and train"):
        import_class(named)


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        import_class("tests.nowhere:Trainer")
