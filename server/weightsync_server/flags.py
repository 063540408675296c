"""Flags and variables of the server: one flat list of all settings, outside the tree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, Self, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    create_model,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from weightsync_server.extensions import settings_groups
from weightsync_server.ops.settings_group import FLAT
from weightsync_server.settings import Settings

#: In this order the help shows settings; those of other names come last.
_ORDER = """
trainer trainer_python trainer_engine trainer_queue trainer_start_timeout_s trainer_silence_s
trainer_grace_s in_place_pause_s checkpoint_dir checkpoint_folders follow follow_interval_s
follow_cache follow_ca follow_cert follow_key follow_token_file fleet fleet_register fleet_ca
fleet_cert fleet_key fleet_member undecided_limit_s member_ttl_s max_skew max_age_s max_unavailable
name engine engines model ranks listen authority tls_cert tls_key tls_client_ca run_dir state_dir
store metrics metrics_open http import_dir slots memory_bytes disk_floor_bytes fetchers ingest
node_of node_rank retain_versions retain_bytes delta_chain_length delta_chain_share
scrub_bytes_per_s max_version_jump push_idle_timeout_s push_resume_timeout_s push_writer_timeout_s
reader_timeout_s same_host same_host_socket max_pushes max_streams max_pulls max_watches max_calls
max_calls_per_s max_connections read_ahead prepare_timeout_s commit_timeout_s pause_lease_s
drain_timeout_s stop_timeout_s reflection log_level
"""


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
    known = {name: found.pop(name) for name in _ORDER.split() if name in found}
    return known | found


#: Makes the tree of flags, variables and keywords; who gives a bad one is told what helps.
Flags = create_model("Settings", __base__=_Flags, __doc__=_Flags.__doc__, **_ordered())
