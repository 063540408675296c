"""Flags and variables of the server: one flat list of all settings, outside the tree."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from weightsync_server.extensions import settings_groups
from weightsync_server.ops.settings_group import FLAT
from weightsync_server.settings import Settings

#: Groups in which help and reference show settings, and their order; others come last.
_GROUPS = {
    "Settings that every server needs": """
        name engine listen authority tls_cert tls_key store slots memory_bytes metrics""",
    "Engines": "engines run_dir model ranks node_of node_rank",
    "Callers": """
        tls_client_ca http host_names import_dir metrics_open reflection max_streams max_pulls
        max_watches max_calls max_calls_per_s max_connections reader_timeout_s""",
    "Pushes": """
        same_host same_host_socket max_pushes max_version_jump push_idle_timeout_s
        push_resume_timeout_s push_writer_timeout_s ingest fetchers read_ahead""",
    "Versions on disk": """
        state_dir disk_floor_bytes retain_versions retain_bytes delta_chain_length
        delta_chain_share scrub_bytes_per_s""",
    "Applies": "prepare_timeout_s commit_timeout_s pause_lease_s in_place_pause_s apply_history",
    "Fleets": """
        fleet fleet_register fleet_member fleet_ca fleet_cert fleet_key undecided_limit_s
        member_ttl_s max_skew max_age_s max_unavailable""",
    "Following an origin": """
        follow follow_interval_s follow_cache follow_ca follow_cert follow_key follow_token_file""",
    "Supervised trainers": """
        trainer trainer_python trainer_engine trainer_queue trainer_start_timeout_s
        trainer_silence_s trainer_grace_s checkpoint_dir checkpoint_folders""",
    "Log and shutdown": "log_level log_format traces drain_timeout_s stop_timeout_s",
}
_OTHERS = "Other settings"

_USAGE = """\
usage: weightsync-server [FLAG ...] [-- VLLM_FLAG ...]
       weightsync-server token new
       weightsync-server --version
"""
_ABOUT = """\
Receives weights from trainers, stores them and applies them to the vLLM beside it.

Each flag is also an environment variable, WEIGHTSYNC_ and the flag's name in capitals with _ for -;
the flag wins. A setting with several values takes its flag several times, or commas between values,
or a JSON list; its variable takes the latter two. With the embedded engine, everything after -- is
passed to vLLM. `token new` prints a new token for a caller.
"""
_MAX_COLUMNS = 100


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


def _flat(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield the flags of a group and of those below it: name, and type and field of pydantic."""
    types = get_type_hints(group)
    for field in fields(group):
        kind, flat = types[field.name], field.metadata.get(FLAT)
        if flat is not None:
            kind = _Several if kind == list[str] else kind
            checked = Annotated[kind, AfterValidator(flat.check)] if flat.check else kind
            yield flat.name or field.name, (checked, Field(**flat.more))
        elif is_dataclass(kind):
            yield from _flat(kind)


def _grown(group: Any, values: Mapping[str, Any]) -> Any:
    """Return a group, and those below it, with the values of their flags."""
    types = get_type_hints(group)
    found = {}
    for field in fields(group):
        if (flat := field.metadata.get(FLAT)) is not None:
            found[field.name] = values[flat.name or field.name]
        elif is_dataclass(types[field.name]):
            found[field.name] = _grown(types[field.name], values)
    return group(**found)


class _Flags(BaseSettings):
    """Settings of weightsync-server: flags win over WEIGHTSYNC_* variables."""

    model_config = SettingsConfigDict(
        env_prefix="WEIGHTSYNC_",
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_prog_name="weightsync-server",
        cli_implicit_flags=True,
        cli_exit_on_error=False,
    )

    _tree: Settings = PrivateAttr()

    @model_validator(mode="after")
    def _grow(self) -> Self:
        extensions = tuple(_grown(group, vars(self)) for group in settings_groups())
        self._tree = replace(_grown(Settings, vars(self)), extensions=extensions)
        self._tree.check()
        return self

    @property
    def tree(self) -> Settings:
        return self._tree


def _ordered() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in (one for group in (*settings_groups(), Settings) for one in _flat(group)):
        if name in found:
            msg = f"two groups of settings have a {name}; rename one"
            raise ValueError(msg)
        found[name] = field
    grouped = " ".join(_GROUPS.values()).split()
    known = {name: found.pop(name) for name in grouped if name in found}
    return known | found


#: Makes the tree of flags, variables and keywords; who gives a bad one is told what helps.
Flags = create_model("Settings", __base__=_Flags, __doc__=_Flags.__doc__, **_ordered())


class ShownSetting(NamedTuple):
    """A setting as people are shown it; a `default` that its meaning explains is empty."""

    flags: tuple[str, ...]
    value: str
    variable: str
    default: str
    meaning: str


def groups() -> Iterator[tuple[str, list[ShownSetting]]]:
    """Yield each group of settings that has any: its title, and its settings in order."""
    placed = {name: title for title, names in _GROUPS.items() for name in names.split()}
    for title in (*_GROUPS, _OTHERS):
        names = [name for name in Flags.model_fields if placed.get(name, _OTHERS) == title]
        if names:
            yield title, [_shown(name, Flags.model_fields[name]) for name in names]


def help_text() -> str:
    """Return what `--help` prints, as wide as the terminal and at most 100 columns."""
    width = min(shutil.get_terminal_size((_MAX_COLUMNS, 0)).columns, _MAX_COLUMNS)
    about = (textwrap.fill(each, width) for each in _ABOUT.split("\n\n"))
    text = _USAGE + "".join(f"\n{each}\n" for each in about)
    for title, settings in groups():
        text += f"\n{title}:\n"
        for one in settings:
            default = f" (default: {one.default})" if one.default else ""
            text += f"  {', '.join(one.flags)} {one.value}".rstrip() + "\n"
            indent = " " * 6
            text += textwrap.fill(
                one.meaning + default,
                width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            text += "\n"
    return text


def _shown(name: str, field: FieldInfo) -> ShownSetting:
    flag, default = name.replace("_", "-"), field.default
    flags = (f"--{flag}", f"--no-{flag}") if field.annotation is bool else (f"--{flag}",)
    if isinstance(default, bool):
        default = str(default).lower()
    elif isinstance(default, list):
        default = ",".join(default)
    shown = "" if default is None or default is PydanticUndefined else str(default)
    variable = f"WEIGHTSYNC_{name.upper()}"
    return ShownSetting(flags, _value(name, field), variable, shown, field.description or "")


def _value(name: str, field: FieldInfo) -> str:
    """Return the word that stands for the value of a flag; a switch has none."""
    if field.annotation is bool:
        return ""
    if field.annotation is int:
        return "BYTES" if "bytes" in name else "N"
    if field.annotation is float:
        return "SECONDS" if name.endswith("_s") and not name.endswith("_per_s") else "NUMBER"
    return "PATH" if field.annotation in (Path, Path | None) else "VALUE"
