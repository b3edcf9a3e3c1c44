"""Rows of many hosts fold to what they have in common; the odd one out is known."""

from __future__ import annotations

from dsrun.launcher.probe.columns import NOTHING, FoldedRow, Share, fold_rows, group_hosts
from dsrun.launcher.table_rows import Row, RowKind


def torch(version: str) -> list[Row]:
    return [Row("versions", "torch", version)]


def one(folded: list[FoldedRow]) -> FoldedRow:
    (row,) = folded
    return row


def test_what_all_have_is_one_share() -> None:
    row = one(fold_rows({f"n{index}": torch("2.13") for index in range(64)}))
    assert row == FoldedRow("versions", "torch", (Share("2.13", tuple(f"n{index}" for index in range(64)), odd=False),))


def test_the_odd_one_out_is_the_one_that_most_are_not_like() -> None:
    row = one(fold_rows({"n1": torch("2.11"), "n2": torch("2.13"), "n3": torch("2.13")}))
    assert row.shares == (Share("2.13", ("n2", "n3"), odd=False), Share("2.11", ("n1",), odd=True))
    assert row.value_of("n1").odd


def test_without_a_majority_all_are_marked() -> None:
    row = one(fold_rows({"n1": torch("2.11"), "n2": torch("2.13")}))
    assert [share.odd for share in row.shares] == [True, True]


def test_what_changes_every_moment_is_no_difference_but_a_range_with_its_ends() -> None:
    def free(gib: int) -> list[Row]:
        return [Row("disk", "free", f"{gib} of 100 GiB", RowKind.NOW, f"{gib} GiB", gib)]

    row = one(fold_rows({"n1": free(90), "n2": free(8), "n3": free(70)}))
    assert [(share.value, share.odd) for share in row.shares] == [("8 GiB (n2) to 90 GiB (n1)", False)]
    assert one(fold_rows({"n1": free(9), "n2": free(9)})).shares[0].value == "9 GiB"


def test_names_and_addresses_are_left_out_unless_asked_for() -> None:
    rows = {name: [Row("host", "name", name, RowKind.OWN)] for name in ("n1", "n2", "n3")}
    assert fold_rows(rows) == []
    row = one(fold_rows(rows, own=True))
    assert [(share.value, share.odd) for share in row.shares] == [("n1", False), ("n2", False), ("n3", False)]


def test_the_brief_value_is_compared() -> None:
    rows = {f"n{index}": [Row("network", "eth0", f"10.0.0.{index} (25 Gbit/s)", brief="25 Gbit/s")] for index in (1, 2)}
    assert one(fold_rows(rows)).shares == (Share("25 Gbit/s", ("n1", "n2"), odd=False),)


def test_a_row_that_a_host_has_not_is_told_and_rows_stay_in_their_sections() -> None:
    cpu, gpu, disk = Row("cpu", "cores", "8"), Row("gpu", "0", "H200"), Row("disk", "at", "/w")
    folded = fold_rows({"n1": [cpu, disk], "n2": [cpu, gpu, disk], "n3": [cpu, gpu, disk]})
    assert [row.section for row in folded] == ["cpu", "disk", "gpu"]
    assert folded[2].shares == (Share("H200", ("n2", "n3"), odd=False), Share(NOTHING, ("n1",), odd=True))


def test_rows_of_one_name_are_compared_in_their_order() -> None:
    both = [Row("network", "rdma", "a"), Row("network", "rdma", "b")]
    folded = fold_rows({"n1": both, "n2": both})
    assert [row.shares[0].value for row in folded] == ["a", "b"]


def test_hosts_that_are_alike_in_all_that_differs_are_one_group() -> None:
    rows = {"n1": torch("1"), "n2": torch("2"), "n3": torch("1"), "n4": torch("1")}
    assert group_hosts(fold_rows(rows), list(rows)) == [("n1", "n3", "n4"), ("n2",)]
