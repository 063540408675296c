"""Answers name the versions that made them, and requests bound which versions they take.

`answer_versions` is the middleware; `request_bounds` what a request asks of versions;
`request_versions` which ones made its answer, and the end of one that its bounds forbid; `spans`
which tokens each of them made, as text.
"""

from __future__ import annotations

from weightsync.vllm.extensions.answers.answer_versions import AnswerVersions

__all__ = ["AnswerVersions"]
