"""What integrations have in common: what they import, and what they refuse when they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import python_says
from weightsync_client import Client, InvalidError
from weightsync_client.integrations import WeightSyncCallback, WeightSyncTransfer

if TYPE_CHECKING:
    Made = type[WeightSyncCallback | WeightSyncTransfer]

both = pytest.mark.parametrize("made", [WeightSyncCallback, WeightSyncTransfer])


@both
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"on_error": "ignore"}, "on_error is 'ignore'; use 'raise' or 'log'"),
        ({"push": {"version": 3}}, "version is given for all steps"),
        ({"push": {"idempotency_key": "k"}}, "idempotency_key is given for all steps"),
        ({"apply": {"idempotency_key": "k"}}, "idempotency_key is given for all steps"),
        ({"push": {"metadata": {"a": None}}}, r"metadata\['a'\] is None; use a string"),
        ({"server": None}, "server is None; use a string"),
        ({"run_id": 7}, "run_id is 7; use a string"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(
    made: Made, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidError, match=sentence):
        made(**{"server": "127.0.0.1:1", **options})


@pytest.mark.parametrize(
    ("every", "sentence"),
    [
        (0, "every is 0; use a whole number from 1"),
        (1.5, "every is 1.5; use a whole number"),
        (True, "every is True; use a whole number"),
    ],
)
def test_steps_that_cannot_be_counted_are_refused(every: Any, sentence: str) -> None:
    with pytest.raises(InvalidError, match=sentence):
        WeightSyncCallback("127.0.0.1:1", every=every)


@both
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"evry": 2}, "unexpected keyword argument 'evry'"),
        ({"push": {"stream": 2}}, "Did you mean 'streams'"),
        ({"apply": {"pauze": "keep"}}, "Did you mean 'pause'"),
    ],
)
def test_a_misspelt_option_is_refused_when_it_is_made(
    made: Made, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TypeError, match=sentence):
        made("127.0.0.1:1", **options)


@both
def test_a_client_and_options_for_one_are_refused(made: Made, client: Client) -> None:
    with pytest.raises(InvalidError, match="model would be for a new client"):
        made(client, model="policy")


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("import weightsync_client.integrations", ["transformers", "vllm"]),
        ("from weightsync_client.integrations import WeightSyncTransfer", ["trl", "vllm"]),
    ],
    ids=["the package", "WeightSyncTransfer"],
)
def test_it_imports_no_framework_that_is_not_asked_for(imported: str, absent: list[str]) -> None:
    program = f"import sys\n{imported}\nprint([name for name in {absent} if name in sys.modules])"
    assert python_says(program) == "[]"


@pytest.mark.parametrize(
    ("name", "needed", "remedy"),
    [
        ("WeightSyncCallback", "transformers", "pip install transformers accelerate"),
        ("WeightSyncTransfer", "transformers", "pip install 'trl==1.16.*'"),
        ("WeightSyncTrainerEngine", "vllm", ""),
    ],
)
def test_what_is_absent_is_one_sentence(name: str, needed: str, remedy: str) -> None:
    program = f"""
import sys
sys.modules["{needed}"] = None
try:
    from weightsync_client.integrations import {name}
except ImportError as error:
    print(error)
"""
    sentence = python_says(program)
    assert sentence.endswith(f"`: {name} needs {needed}")
    assert remedy in sentence


def test_an_unknown_member_is_no_attribute() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Other'"):
        from weightsync_client.integrations import Other  # noqa: F401
