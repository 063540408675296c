"""The fields in which verl and miles keep the versions of an answer, set from the answer itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from weightsync_client.client import Client
from weightsync_client.errors import invalid
from weightsync_client.spans import versions_of

__all__ = ["VersionLabels", "miles_meta_info", "verl_extra_fields"]


class VersionLabels:
    """Tells a number that versions have in their metadata, and asks the server once for each.

    Args:
        client: Of the server that has the versions.
        label: Its name in the metadata, such as `step`, which verl's engine and the callback of
            transformers give, or `sync`, of TRL's hook.

    Raises:
        InvalidError: When called: a version has no such number.
        ClientError: When called: the server does not answer, or has no such version.
    """

    def __init__(self, client: Client, label: str = "step") -> None:
        self._client = client
        self._label = label
        self._known: dict[int, int] = {}
        self._lock = threading.Lock()

    def __call__(self, version: int) -> int:
        """Return the number of a version."""
        with self._lock:
            if version not in self._known:
                text = self._client.get_version(version).metadata.get(self._label, "")
                if not (text.isascii() and text.isdigit()):
                    raise invalid(
                        f"push version {version} with metadata {self._label!r}, a whole number: it "
                        f"has {text!r}"
                    )
                self._known[version] = int(text)
            return self._known[version]


def verl_extra_fields(response: Any, steps: Callable[[int], int]) -> dict[str, int]:
    """Return what verl keeps of an answer in `TokenOutput.extra_fields`.

    verl itself stamps the step that its server counted when the answer began or ended. Where it
    continues an answer that was aborted, give the smallest and the largest of all parts.

    Args:
        response: What `versions_of` takes; in verl's vLLM server the RequestOutput.
        steps: Returns the step of a version, such as `VersionLabels(client)`.

    Raises:
        ClientError: Of `versions_of` or `steps`.
    """
    found = [steps(version) for version in versions_of(response).versions]
    oldest, newest = min(found), max(found)
    return {"global_steps": newest, "min_global_steps": oldest, "max_global_steps": newest}


def miles_meta_info(response: Any, choice: int = 0) -> dict[str, Any]:
    """Return what `Sample.update_from_meta_info` of miles and slime reads of an answer.

    Put it into the `meta_info` of a turn. `weight_versions` has the spans, which newer releases of
    miles read if they are there; others, and slime, read `weight_version`, here the oldest one.

    Args:
        response: What `versions_of` takes; ask for it with `x-weightsync-spans: 1`.
        choice: Which one, where a request asks for several.

    Raises:
        InvalidError: Of `versions_of`, or the answer has no such choice.
    """
    found = versions_of(response)
    if not found.sequences:
        return {"weight_version": str(found.oldest)}
    if not 0 <= choice < len(found.sequences):
        raise invalid(f"choice is {choice}; this answer has {len(found.sequences)}, from 0")
    spans = found.sequences[choice].spans
    oldest = min((span.version for span in spans), default=found.oldest)
    return {
        "weight_version": str(oldest),
        "weight_versions": [
            {"version": str(span.version), "start": span.start, "end": span.end} for span in spans
        ],
    }
