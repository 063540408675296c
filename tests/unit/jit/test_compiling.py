"""Where compiled code is kept: only where nobody else can put other code."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightsync.jit.compiling import _folder

_PACKAGE = Path(__file__).parent


def test_code_is_not_loaded_from_a_folder_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    folder = _folder.__wrapped__(_PACKAGE)
    assert folder is not None
    assert folder.parent.parent == tmp_path
    folder.chmod(0o770)
    assert _folder.__wrapped__(_PACKAGE) is None
    folder.chmod(0o700)
    folder.parent.chmod(0o777)
    assert _folder.__wrapped__(_PACKAGE) is None
    folder.parent.chmod(0o700)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert _folder.__wrapped__(_PACKAGE) is None
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/nowhere")
    assert _folder.__wrapped__(_PACKAGE) is None


def test_code_of_other_sources_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    package = tmp_path / "package"
    package.mkdir()
    folders = []
    for text in ("a = 1", "a = 2"):
        (package / "kernels.py").write_text(text)
        folders.append(_folder.__wrapped__(package))
    assert folders == [*dict.fromkeys(folders)]
    assert None not in folders
