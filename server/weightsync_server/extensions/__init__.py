"""The list of what can be taken away from the server, for `app` and `flags` alone.

Each function imports what it returns, so that a process loads no more than what it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weightsync_server.http.extension_points import (
    ExtensionHome,
    ExtensionSettings,
    ExtraService,
    MakeHttpVerbs,
)

if TYPE_CHECKING:
    from weightsync_server.engine import EngineSet
    from weightsync_server.engine.served_engines import MakeWatcher
    from weightsync_server.model import Model
    from weightsync_server.ops.metrics import Metrics


def settings_groups() -> tuple[type[ExtensionSettings], ...]:
    """Return the groups of settings that the server's flags and variables get from extensions."""
    from weightsync_server.extensions.trainer.trainer_settings import TrainerSettings

    return (TrainerSettings,)


def extra_services(
    settings: Sequence[ExtensionSettings],
    home: ExtensionHome,
    engines: EngineSet,
    model: Model,
    metrics: Metrics,
) -> tuple[ExtraService, ...]:
    """Return services beside the server's own; `settings` has each extension's group."""
    from weightsync_server.extensions.trainer.training import supervised_trainer

    return (supervised_trainer(settings, home, engines, model, metrics),)


def http_verbs() -> tuple[MakeHttpVerbs, ...]:
    """Return what has verbs over HTTP."""
    from weightsync_server.extensions.vllm_verbs import VllmVerbs

    return (VllmVerbs,)


def engine_watchers() -> tuple[MakeWatcher, ...]:
    """Return what watches each engine."""
    from weightsync_server.extensions.update_committer import UpdateCommitter

    return (UpdateCommitter,)
