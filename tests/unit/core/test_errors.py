from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from weightsync.errors import EXPLANATIONS, STATUS, Reason, WeightSyncError

ROOT = Path(__file__).resolve().parents[3]


def test_every_reason_has_a_status() -> None:
    assert set(STATUS) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_statuses_are_names_of_grpc_codes(reason: Reason) -> None:
    assert WeightSyncError(reason, "no").code is grpc.StatusCode[STATUS[reason]]


def test_unknown_and_internal_never_come_from_our_code() -> None:
    assert not set(STATUS.values()) & {"UNKNOWN", "INTERNAL", "OK"}


@pytest.mark.parametrize("reason", Reason)
def test_reasons_are_what_error_info_wants(reason: Reason) -> None:
    # https://github.com/googleapis/googleapis/blob/master/google/rpc/error_details.proto
    assert reason.value == reason.name
    assert reason.value.replace("_", "").isalpha()
    assert len(reason.value) <= 63


def test_the_issue_names_these_statuses() -> None:
    wanted = {
        Reason.MODEL_UNKNOWN: "NOT_FOUND",
        Reason.VERSION_UNKNOWN: "NOT_FOUND",
        Reason.LAYOUT_INVALID: "INVALID_ARGUMENT",
        Reason.SHARD_INVALID: "INVALID_ARGUMENT",
        Reason.DIGEST_MISMATCH: "INVALID_ARGUMENT",
        Reason.DATA_CORRUPT: "DATA_LOSS",
        Reason.VERSION_CONFLICT: "ALREADY_EXISTS",
        Reason.VERSION_NOT_ABOVE: "FAILED_PRECONDITION",
        Reason.VERSION_BELOW_LIVE: "FAILED_PRECONDITION",
        Reason.EPOCH_STALE: "FAILED_PRECONDITION",
        Reason.PUSH_INCOMPLETE: "FAILED_PRECONDITION",
        Reason.NO_SLOT: "RESOURCE_EXHAUSTED",
        Reason.MEMORY_EXHAUSTED: "RESOURCE_EXHAUSTED",
        Reason.DISK_EXHAUSTED: "RESOURCE_EXHAUSTED",
        Reason.ENGINE_AWAY: "UNAVAILABLE",
        Reason.ENGINE_FENCED: "FAILED_PRECONDITION",
        Reason.VERSION_JUMP: "OUT_OF_RANGE",
    }
    assert {reason: STATUS[reason] for reason in wanted} == wanted


def test_facts_are_copied() -> None:
    facts = {"offset": "7"}
    error = WeightSyncError(Reason.OFFSET_MISMATCH, "send from 7", metadata=facts)
    facts["offset"] = "8"
    assert error.metadata == {"offset": "7"}
    assert str(error) == "send from 7"


def test_raising_needs_no_grpc() -> None:
    program = (
        "import sys\n"
        "from weightsync.errors import Reason, WeightSyncError\n"
        "str(WeightSyncError(Reason.FAULT, 'x'))\n"
        "sys.exit('grpc' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=30).returncode == 0


def test_the_page_of_all_reasons_is_current() -> None:
    text = (ROOT / "docs/reference/errors.md").read_text()
    for reason in Reason:
        assert text.count(f"| `{reason}` |") == 1


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_explained_in_sentences_that_fit_a_table(reason: Reason) -> None:
    one = EXPLANATIONS[reason]
    for text in (one.meaning, one.remedy):
        assert text.endswith(".")
        assert text.isprintable()
        assert "|" not in text
