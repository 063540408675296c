"""Names of the keys of a version."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weightsync.vllm.lineage.admission import AdmissionKeys
from weightsync.vllm.lineage.cache_key import GROUP_PREFIX, KeyNames, salted


def test_a_name_is_given_up_where_other_content_lies_under_it() -> None:
    names = KeyNames()
    assert (names.name(""), names.name("aa")) == ("weightsync:loaded", "weightsync:aa")
    names.give_up("weightsync:aa")
    assert (names.name("bb"), names.name("aa")) == ("weightsync:bb", "weightsync:aa.1")
    # A name that was given up already takes no further one with it.
    names.give_up("weightsync:aa")
    assert names.name("aa") == "weightsync:aa.1"
    names.give_up("weightsync:aa.1")
    names.give_up("weightsync:loaded")
    names.give_up("weightsync:unknown.0a1b")
    assert (names.name("aa"), names.name("")) == ("weightsync:aa.2", "weightsync:loaded.1")


@pytest.mark.parametrize(
    ("salt", "wanted"),
    [
        (None, "key"),
        ("", "key"),
        ("mine", "key|mine"),
        ("key", "key|key"),
        (f"{GROUP_PREFIX}7", f"{GROUP_PREFIX}7"),
    ],
)
def test_a_salt_is_joined_to_the_key_and_a_groups_is_not(salt: str | None, wanted: str) -> None:
    assert salted("key", salt) == wanted


def test_admission_gives_every_switch_a_name_of_its_own() -> None:
    salts: list[str] = []
    processor = SimpleNamespace(add_request=lambda request: salts.append(request.cache_salt))
    keys = AdmissionKeys(SimpleNamespace(output_processor=processor), "one")
    for key in ("two", "one"):
        processor.add_request(SimpleNamespace(cache_salt=None))
        keys.move(key)
    processor.add_request(SimpleNamespace(cache_salt="mine"))
    assert salts == ["one", "two.1", "one.2|mine"]
