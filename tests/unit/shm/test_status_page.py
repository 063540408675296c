from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.shm.status_page import PAGE_BYTES, PageReader, PageWriter

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def page() -> Iterator[PageReader]:
    reader = PageReader()
    yield reader
    reader.close()


def _writer(page: PageReader) -> PageWriter:
    return PageWriter(os.dup(page.segment.fd))


def test_nothing_before_the_first_report(page: PageReader) -> None:
    assert page.read() is None


def test_the_latest_report_counts(page: PageReader) -> None:
    writer = _writer(page)
    for report in ({"phase": "running"}, {"phase": "ready", "names": ["ä"] * 10}, {}):
        writer.write(report)
        assert page.read() == report
    writer.close()


def test_a_writer_goes_on_where_another_ended(page: PageReader) -> None:
    for number in range(3):
        writer = _writer(page)
        writer.write({"number": number})
        writer.close()
        assert page.read() == {"number": number}


def test_a_writer_that_died_halfway_is_followed_by_another(page: PageReader) -> None:
    writer = _writer(page)
    writer.write({"number": 1})
    writer.close()
    page.segment.view[0] = 3
    assert page.read() is None
    writer = _writer(page)
    writer.write({"number": 2})
    assert page.read() == {"number": 2}
    assert page.segment.view[0] == 6
    writer.close()


def test_a_report_that_is_too_large_is_refused_and_changes_nothing(page: PageReader) -> None:
    writer = _writer(page)
    fits = {"names": "x" * (PAGE_BYTES - 40)}
    writer.write(fits)
    for size in (PAGE_BYTES - 20, PAGE_BYTES, 10 * PAGE_BYTES):
        with pytest.raises(ValueError, match="at most"):
            writer.write({"names": "x" * size})
    assert page.read() == fits
    writer.close()


def test_reports_that_are_no_json_change_nothing(page: PageReader) -> None:
    writer = _writer(page)
    writer.write({"phase": "ready"})
    with pytest.raises(TypeError):
        writer.write({"phase": object()})
    assert page.read() == {"phase": "ready"}
    writer.close()


@pytest.mark.parametrize("at", [0, 8, 15, 16, 20, 30])
def test_a_flipped_bit_is_no_report(page: PageReader, at: int) -> None:
    writer = _writer(page)
    writer.write({"phase": "ready", "proved": True})
    page.segment.view[at] ^= 1
    assert page.read() is None
    writer.close()


def test_a_list_is_no_report(page: PageReader) -> None:
    writer = _writer(page)
    writer.write([1])  # type: ignore[arg-type]
    assert page.read() is None
    writer.close()


def test_the_descriptor_is_closed_when_it_cannot_be_mapped() -> None:
    fd = os.open("/dev/null", os.O_RDWR)
    with pytest.raises(OSError):
        PageWriter(fd)
    with pytest.raises(OSError):
        os.fstat(fd)


_HAMMER = """
import sys
from weightsync.shm.status_page import PageWriter
writer = PageWriter(int(sys.argv[1]))
print("ready", flush=True)
number = 0
while True:
    number += 1
    writer.write({"number": number, "fill": str(number) * (number % 3000), "again": number})
"""


def _check(report: dict[str, Any]) -> int:
    number: int = report["number"]
    assert report["again"] == number
    assert report["fill"] == str(number) * (number % 3000)
    return number


def test_a_torn_report_is_never_returned(page: PageReader) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _HAMMER, str(page.segment.fd)],
        pass_fds=[page.segment.fd],
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        seen, torn = [0], 0
        end = time.monotonic() + 2
        while time.monotonic() < end:
            report = page.read()
            if report is None:
                torn += 1
            else:
                seen.append(_check(report))
    finally:
        child.kill()
        child.communicate()
    assert seen == sorted(seen)
    assert len(set(seen)) > 20
    assert torn, "the writer was never met at work: this proves nothing"


def test_a_checksum_decides_where_the_sequence_lies(page: PageReader) -> None:
    # What a reader on a machine with weak memory order may see: an old head, a new body.
    writer = _writer(page)
    writer.write({"a": 1})
    head = bytes(page.segment.view[:20])
    writer.write({"a": 2})
    page.segment.view[:20] = head
    assert page.read() is None
    page.segment.view[20:28] = json.dumps({"a": 1}).encode()
    assert page.read() == {"a": 1}
    writer.close()
