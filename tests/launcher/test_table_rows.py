"""Numbers and names in few words."""

from __future__ import annotations

import pytest

from dsrun.launcher.table_rows import Row, fold_names, in_brackets, number_ranges, size_text


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["n1"], "n1"),
        (["n1", "n2", "n3", "n7"], "n[1-3,7]"),
        (["n08", "n09", "n10", "n11"], "n[08-11]"),
        (["n8", "n9", "n10"], "n[8-10]"),
        (["mlx5_0", "mlx5_9", "mlx5_10"], "mlx5_[0,9-10]"),
        (["n1", "n01"], "n1,n01"),
        (["login", "n1", "n2", "gpu-1.lan", "gpu-2.lan"], "login,n[1-2],gpu-[1-2].lan"),
        (["10.0.0.1", "10.0.0.2", "10.0.1.3"], "10.0.0.[1-2],10.0.1.3"),
        ([], ""),
    ],
)
def test_names_are_folded_as_a_hostfile_could_have_them(names: list[str], folded: str) -> None:
    assert fold_names(names) == folded


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([2, 0, 1, 6], "0-2,6"), ([0, 2, 4], "0,2,4")])
def test_numbers_are_folded_to_ranges(numbers: list[int], text: str) -> None:
    assert number_ranges(numbers) == text


def test_words_of_rows() -> None:
    assert (size_text(None), size_text(1536)) == ("?", "1.5 KiB")
    assert (in_brackets([]), in_brackets(["a", "b"])) == ("", " (a, b)")
    assert (Row("s", "l", "v").shared, Row("s", "l", "v", brief="b").shared) == ("v", "b")
