"""What the commands print of versions and pushes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.cli import render
from weightsync_client.rpc import convert

if TYPE_CHECKING:
    from weightsync.v1.weightsync_pb2 import LayoutCheck

_LABELS = [(pb.LAYOUT_CHECK_UNCHECKED, True), (pb.LAYOUT_CHECK_PASSED, False), (0, False)]


@pytest.mark.parametrize(("check", "shown"), _LABELS)
def test_unchecked_is_shown_of_versions_and_pushes(
    check: LayoutCheck.ValueType, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    info = pb.VersionInfo(model="m", version=7, layout_check=check)
    render.show_version(convert.to_version(info))
    assert ("unchecked" in capsys.readouterr().out) is shown
    push = pb.PushStatus(push_id="p", version=8, layout_check=check)
    model = pb.ModelStatus(model="m", pushes=[push], apply_id="a1")
    render.show_status(convert.to_status(pb.GetStatusResponse(models=[model])))
    out = capsys.readouterr().out
    assert ("unchecked" in out) is shown
    assert "apply a1 in progress" in out
