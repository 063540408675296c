"""Write the pages of docs/reference/ that the code knows: commands, settings, calls and errors.

python scripts/reference_pages.py

A test compares what is committed with what this would write.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from weightsync.errors import EXPLANATIONS
from weightsync_client.cli.cli_options import MEANINGS
from weightsync_client.cli.main import app
from weightsync_server.flags import ShownSetting, groups

__all__ = ["pages"]

ROOT = Path(__file__).resolve().parent.parent
_REFERENCE = ROOT / "docs" / "reference"
_PROTOS = ROOT / "protos"
_WRITTEN = "<!-- Written by `make reference` from {}: change that. -->\n\n"


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    return {
        _REFERENCE / "cli.md": _cli(),
        _REFERENCE / "settings.md": _settings(),
        _REFERENCE / "rpc.md": _rpc(),
        _REFERENCE / "errors.md": _errors(),
    }


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


_ERRORS = """\
# Errors

{}Every refusal is a gRPC status with one sentence that names the remedy and a
`google.rpc.ErrorInfo` (domain `weightsync`). Its `reason` is one of these and keeps its meaning
from release to release; its `metadata` has facts for programs. A `RetryInfo` is attached where a
retry may help. `weightsync_client` raises them as `ClientError` with `reason`, `message`,
`metadata` and `retry_after_s`.

A status without `ErrorInfo` is not ours. It comes from gRPC itself or from a proxy: a broken link,
a message of more than 16 MiB, more than `max_calls` calls at once. UNKNOWN and INTERNAL are never
ours.

| reason | status | what it means | what to do |
|---|---|---|---|
"""


def _errors() -> str:
    rows = (
        f"| `{reason}` | {one.status} | {one.meaning} | {one.remedy} |\n"
        for reason, one in sorted(EXPLANATIONS.items())
    )
    return _ERRORS.format(_WRITTEN.format("weightsync/errors.py")) + "".join(rows)


_CLI = """\
# Command line

{}`weightsync` talks to a server. `weightsync-server` is one; [Server settings](settings.md) lists
its flags. Token and TLS come from environment variables, because all users of a host see the
arguments of a command.

"""


def _cli() -> str:
    command: Any = typer.main.get_command(app)
    text = _CLI.format(_WRITTEN.format("client/weightsync_client/cli"))
    text += "".join(_commands("weightsync", command))
    text += "## Exit codes\n\n| code | meaning |\n|---|---|\n"
    return text + "".join(f"| {code.value} | {_cell(what)} |\n" for code, what in MEANINGS.items())


def _commands(name: str, command: Any) -> Iterator[str]:
    for part, child in getattr(command, "commands", {}).items():
        if hasattr(child, "commands"):
            yield from _commands(f"{name} {part}", child)
            continue
        yield f"## `{name} {part}`\n\n{' '.join(child.help.split())}\n\n"
        yield "| argument | meaning | default |\n|---|---|---|\n"
        for parameter in child.params:
            yield _parameter(parameter)
        yield "\n"


def _parameter(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    if not names[0].startswith("-"):
        names = [parameter.metavar or names[0].upper()]
    words = " ".join(f"`{name}`" for name in names)
    shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    default = "" if shown in (None, "", False) else f"`{shown}`"
    if parameter.required:
        default = "required"
    meaning = _cell(parameter.help or "")
    if parameter.envvar:
        meaning += f" Variable: `{parameter.envvar}`."
    return f"| {words} | {meaning} | {default} |\n"


_SETTINGS = """\
# Server settings

{}Each setting of `weightsync-server` is a flag and an environment variable; the flag wins. A
setting with several values takes its flag several times, or commas between values, or a JSON list;
its variable takes the latter two. With the embedded engine, everything after `--` is passed to
vLLM.
"""


def _settings() -> str:
    text = _SETTINGS.format(_WRITTEN.format("the groups of settings in server/"))
    for title, settings in groups():
        text += f"\n## {title}\n\n| flag | variable | default | meaning |\n|---|---|---|---|\n"
        text += "".join(map(_setting, settings))
    return text


def _setting(one: ShownSetting) -> str:
    flags = " ".join(f"`{flag}`" for flag in one.flags)
    default = f"`{one.default}`" if one.default else ""
    return f"| {flags} | `{one.variable}` | {default} | {_cell(one.meaning)} |\n"


_RPC = """\
# gRPC API

{}The services of a server, from [protos/](../../protos). Any gRPC client can call them; the Python
client is one. A call without a field sends its default: 0, empty or the first value of an enum.

"""
_SERVICES = (
    "weightsync/v1/weightsync.proto",
    "weightsync/v1/attach.proto",
    "weightsync/v1/train.proto",
)


class _File:
    """One proto file, and the comments in it by their path of numbers (descriptor.proto)."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self.file = file
        self._comments = {
            tuple(place.path): place.leading_comments for place in file.source_code_info.location
        }

    def comment(self, *path: int) -> str:
        return _cell(self._comments.get(path, ""))


def _rpc() -> str:
    text = _RPC.format(_WRITTEN.format("protos/"))
    found = [_File(file) for file in _described() if file.name in _SERVICES]
    found.sort(key=lambda one: _SERVICES.index(one.file.name))
    for one in found:
        for at, service in enumerate(one.file.service):
            text += f"## {service.name}\n\n{one.comment(6, at)}\n\n"
            text += "| call | takes | returns | what it does |\n|---|---|---|---|\n"
            for number, method in enumerate(service.method):
                takes = ("stream " if method.client_streaming else "") + _link(method.input_type)
                gives = ("stream " if method.server_streaming else "") + _link(method.output_type)
                comment = one.comment(6, at, 2, number)
                text += f"| `{method.name}` | {takes} | {gives} | {comment} |\n"
            text += "\n"
    for one in found:
        text += f"## Messages of {Path(one.file.name).name}\n\n"
        for at, message in enumerate(one.file.message_type):
            text += "".join(_message(one, message, (4, at), ""))
        for at, enum in enumerate(one.file.enum_type):
            text += _enum(one, enum, (5, at), "")
    return text.rstrip("\n") + "\n"


def _described() -> list[FileDescriptorProto]:
    """Return the files of protos/ as protoc reads them, comments included."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "protos.bin")
        command = [
            *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={_PROTOS}"),
            *("--include_source_info", f"--descriptor_set_out={out}"),
            *(str(_PROTOS / name) for name in _SERVICES),
        ]
        subprocess.run(command, check=True)
        return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def _short(name: str) -> str:
    return name.removeprefix(".weightsync.v1.").removeprefix(".")


def _link(name: str) -> str:
    short = _short(name)
    return f"`{short}`" if "google" in short else f"[{short}](#{short.lower().replace('.', '')})"


def _message(
    one: _File, message: DescriptorProto, path: tuple[int, ...], outer: str
) -> Iterator[str]:
    name = f"{outer}{message.name}"
    entries = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
    yield f"### {name}\n\n{one.comment(*path)}\n\n"
    if message.field:
        yield "| field | type | meaning |\n|---|---|---|\n"
    for at, field in enumerate(message.field):
        kind = _type(field, entries)
        yield f"| `{field.name}` | {kind} | {one.comment(*path, 2, at)} |\n"
    if message.field:
        yield "\n"
    for at, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(one, nested, (*path, 3, at), f"{name}.")
    for at, enum in enumerate(message.enum_type):
        yield _enum(one, enum, (*path, 4, at), f"{name}.")


def _type(field: FieldDescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = (_type(part, {}) for part in entry.field)
        return f"map of {key} to {value}"
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    named = _link(field.type_name) if field.type_name else f"`{kind}`"
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    return f"repeated {named}" if repeated else named


def _enum(one: _File, enum: EnumDescriptorProto, path: tuple[int, ...], outer: str) -> str:
    text = f"### {outer}{enum.name}\n\n{one.comment(*path)}\n\n| value | meaning |\n|---|---|\n"
    for at, value in enumerate(enum.value):
        text += f"| `{value.name}` = {value.number} | {one.comment(*path, 2, at)} |\n"
    return text + "\n"


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
