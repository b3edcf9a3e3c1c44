"""Results of other ranks' that a recomputed call keeps for its second run."""

from __future__ import annotations

import torch
from torch import Tensor

from dsrun.runtime.kept_results import KeptResults, keeping, kept_result, kept_without_product


class Made:
    """Makes tensors, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Tensor:
        self.count += 1
        return torch.full((2,), float(self.count))


def test_outside_of_a_call_each_result_is_made() -> None:
    make = Made()
    assert [kept_result(make)[0].item() for _ in range(2)] == [1, 2]


def test_a_second_run_gets_what_the_first_has_made_in_order() -> None:
    make, results = Made(), KeptResults()
    with keeping(results):
        first = [kept_result(make) for _ in range(3)]
    assert results.nbytes == 3 * 8
    again: list[Tensor] = []
    for _ in range(2):
        results.run_again()
        with keeping(results):
            again = [kept_result(make) for _ in range(3)]
        assert [value[0].item() for value in again] == [1, 2, 3]
    assert make.count == 3
    assert again[0].data_ptr() == first[0].data_ptr(), "no copy is kept"


def test_what_was_written_to_since_is_made_again() -> None:
    make, results = Made(), KeptResults()
    with keeping(results):
        kept_result(make).add_(1)
        kept_result(make)
    results.run_again()
    with keeping(results):
        assert kept_result(make)[0].item() == 3
        assert kept_result(make)[0].item() == 2


def test_beside_products_that_of_a_result_goes_and_the_result_is_a_copy() -> None:
    make, results, product = Made(), KeptResults(beside_products=True), torch.ones(4, 2)
    with keeping(results):
        made = kept_without_product(product, make)
    left, shape = product.untyped_storage().nbytes(), tuple(product.shape)
    assert (left, shape) == (0, (4, 2))
    made.add_(1)  # it cannot be made again
    for _ in range(2):
        results.run_again()
        with keeping(results):
            found = kept_without_product(product, make).add_(1).tolist()
        assert found == [2, 2]  # without the product, whose values no failing test may print


def test_where_no_products_are_kept_and_outside_of_a_call_a_product_stays() -> None:
    for results in (None, KeptResults()):
        product = torch.ones(4, 2)
        with keeping(results):
            assert kept_without_product(product, lambda product=product: product.sum(0)).tolist() == [4, 4]
        assert product.untyped_storage().nbytes() == 32


def test_a_further_run_that_asks_for_more_than_was_kept_has_the_rest_made() -> None:
    """As where its first run has ended early, or a branch is another one."""
    make, results = Made(), KeptResults()
    with keeping(results):
        kept_result(make)
    results.run_again()
    with keeping(results):
        assert [kept_result(make)[0].item() for _ in range(3)] == [1, 2, 3]
    assert results.nbytes == 8, "a further run keeps nothing"


def test_inside_a_part_that_is_of_no_call_nothing_is_kept() -> None:
    make, results = Made(), KeptResults()
    with keeping(results):
        kept_result(make)
        with keeping(None):
            kept_result(make)
    assert results.nbytes == 8


def test_a_call_that_is_over_keeps_nothing() -> None:
    make, results = Made(), KeptResults()
    with keeping(results):
        kept_result(make)
    results.clear()
    assert results.nbytes == 0
