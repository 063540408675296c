"""What others rely on by name: Python, commands, settings, variables, calls, HTTP paths.

    python -m tests.vectors.borders

writes `borders.json` anew, for a release that adds something. `tests/unit/test_borders.py` holds
the code against it, so that nothing goes or changes its shape unnoticed while files move.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from weightsync.debug.v1 import debug_pb2
from weightsync.engine.v1 import engine_pb2
from weightsync.node.v1 import node_pb2
from weightsync.v1 import attach_pb2, train_pb2, weightsync_pb2
from weightsync_client.cli.main import app
from weightsync_server.extensions.trainer.training import TrainVerbs
from weightsync_server.extensions.vllm_verbs import VllmVerbs
from weightsync_server.flags import Flags
from weightsync_server.http.read_verbs import ReadVerbs
from weightsync_server.http.status_page import StatusPage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from google.protobuf.descriptor import Descriptor, FieldDescriptor

__all__ = ["FILE", "recorded"]

FILE = Path(__file__).with_name("borders.json")
_ROOT = Path(__file__).parents[2]
_PACKAGES = (
    "weightsync",
    "weightsync.delta",
    "weightsync.engine",
    "weightsync.testing",
    "weightsync_client",
    "weightsync_client.attach",
    "weightsync_client.integrations",
    "weightsync_client.trainer",
)
_WIRES = tuple(
    module.DESCRIPTOR
    for module in (weightsync_pb2, attach_pb2, train_pb2, engine_pb2, node_pb2, debug_pb2)
)


def recorded() -> dict[str, dict[str, Any]]:
    """Return each border as the code has it now: what is found there, by its name."""
    return {
        "python": {name: _shape(value) for name, value in _public()},
        "commands": dict(_commands(typer.main.get_command(app))),
        "settings": {name: repr(field.get_default()) for name, field in Flags.model_fields.items()},
        "variables": dict.fromkeys(_variables(), ""),
        "messages": {
            name: shape for file in _WIRES for name, shape in _messages(file.message_types_by_name)
        },
        "enums": {
            each.full_name: {value.name: value.number for value in each.values}
            for file in _WIRES
            for each in file.enum_types_by_name.values()
        },
        "calls": {
            call.full_name: f"{call.input_type.full_name} -> {call.output_type.full_name}"
            for file in _WIRES
            for service in file.services_by_name.values()
            for call in service.methods
        },
        "http": _paths(),
    }


def _public() -> Iterator[tuple[str, Any]]:
    for package in _PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            yield f"{package}.{name}", getattr(module, name)


def _shape(value: Any) -> Any:
    """Return what a caller has to know of a public name: parameters, fields, members."""
    if not inspect.isclass(value):
        return _parameters(value) if callable(value) else type(value).__name__
    if issubclass(value, enum.Enum):
        return ", ".join(value.__members__)
    ours = [vars(base) for base in value.__mro__ if base.__module__.startswith("weightsync")]
    names = sorted({name for found in ours for name in found if not name.startswith("_")})
    fields = set(getattr(value, "__dataclass_fields__", ()))
    calls = [name for name in names if callable(getattr(value, name, None))]
    return {
        "()": _parameters(value),
        "fields": ", ".join(sorted(fields | (set(names) - set(calls)))),
        **{name: _parameters(getattr(value, name)) for name in calls},
    }


def _parameters(function: Any) -> str:
    """Return the parameters of a function without their types, which may become wider."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ""
    shown = ", ".join(str(each.replace(annotation=inspect.Parameter.empty)) for each in found)
    # Where a default is an object without a name of its own.
    return re.sub(r" at 0x[0-9a-f]+", "", shown)


def _commands(command: Any, path: str = "weightsync") -> Iterator[tuple[str, str]]:
    options = [name for each in command.params for name in (*each.opts, *each.secondary_opts)]
    yield path, ", ".join(sorted(options))
    for name, each in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(each, f"{path} {name}")


def _variables() -> list[str]:
    """Return every environment variable that the product names."""
    found: set[str] = set()
    for package in ("weightsync", "server", "client"):
        for path in (_ROOT / package).rglob("*.py"):
            found |= set(re.findall(r"\bWEIGHTSYNC_[A-Z0-9_]*[A-Z0-9]\b", path.read_text()))
    return sorted(found)


def _messages(found: Mapping[str, Descriptor]) -> Iterator[tuple[str, dict[str, str]]]:
    for message in found.values():
        yield message.full_name, {field.name: _field(field) for field in message.fields}
        yield from _messages(message.nested_types_by_name)


def _field(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    return f"{field.number} {kind.full_name if kind else field.type}"


def _paths() -> dict[str, str]:
    calls = cast("Any", None)
    others = StatusPage(calls, calls), VllmVerbs(calls, "default", ()), TrainVerbs(calls, "default")
    verbs = dict(ReadVerbs(calls, "default").verbs)
    for each in others:
        verbs |= each.verbs
    return {path: verb.method for path, verb in sorted(verbs.items())}


if __name__ == "__main__":
    FILE.write_text(json.dumps(recorded(), indent=1, sort_keys=True) + "\n")
