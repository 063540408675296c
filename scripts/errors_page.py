"""Write docs/errors.md from the table of reasons in weightsync/errors.py; a test compares them."""

from __future__ import annotations

from pathlib import Path

from weightsync.errors import EXPLANATIONS

__all__ = ["PAGE", "text"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"

_HEAD = """\
# Errors

<!-- Written by `make errors` from weightsync/errors.py: change that. -->

Every refusal is a gRPC status with one sentence that names the remedy and a `google.rpc.ErrorInfo`
(domain `weightsync`), whose `reason` is one of these and keeps its meaning from release to release,
with facts for programs in its `metadata`; and a `RetryInfo` where a retry may help.
`weightsync_client` raises them as `ClientError` with `reason`, `message`, `metadata` and
`retry_after_s`.

A status without `ErrorInfo` is none of ours but gRPC's own or a proxy's: a broken link, a message
of more than 16 MiB, more than `max_calls` at once. UNKNOWN and INTERNAL are never ours.

| reason | status | what it means | what to do |
|---|---|---|---|
"""


def text() -> str:
    """Return the page."""
    rows = (
        f"| `{reason}` | {one.status} | {one.meaning} | {one.remedy} |\n"
        for reason, one in sorted(EXPLANATIONS.items())
    )
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(text())
