"""What was given and what was wanted, in a clause."""

from __future__ import annotations

from weightsync.model.tensor_facts import unlike


def test_both_are_told() -> None:
    assert unlike("w", ("F32", (2, 3)), ("BF16", (2, 3))) == (
        "tensor w is F32 [2, 3], the engine has BF16 [2, 3]"
    )
    assert unlike("w", ("F32", ()), ("BF16", (1,))) == (
        "tensor w is F32 [], the engine has BF16 [1]"
    )


def test_rows_that_pad_a_vocabulary_are_told() -> None:
    padded = unlike("embed", ("BF16", (576, 64)), ("BF16", (509, 64)))
    assert padded.endswith("(it has 576 rows, the engine has 509: cut a vocabulary that is padded)")
    assert "rows" not in unlike("embed", ("BF16", (500, 64)), ("BF16", (509, 64)))
    assert "rows" not in unlike("embed", ("BF16", (576, 65)), ("BF16", (509, 64)))


def test_a_long_name_is_cut() -> None:
    assert len(unlike("n" * 1000, ("U8", (1,)), ("I8", (1,)))) < 200
