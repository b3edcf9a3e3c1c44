"""Numbers of a rank that are added up over all ranks once a step."""

from __future__ import annotations

import torch

from dsrun.runtime.engine.step_sums import NUMBERS, RankNumbers, StepSums, read_sums


def test_numbers_are_read_by_the_names_they_were_added_by() -> None:
    first, second = RankNumbers(torch.device("cpu")), RankNumbers(torch.device("cpu"))
    for numbers in (first, second):
        numbers.add("losses", torch.tensor([[0.5]], dtype=torch.bfloat16, requires_grad=True))
        numbers.add("tokens", torch.tensor(3))
        numbers.add("tokens", 4)
        numbers.add("model_flops", 1e18)
        numbers.put("stop_request", 1.0)
    read = read_sums([*(first.values_N() + second.values_N()).tolist(), 7.0])
    assert read == StepSums(1.0, stop_request=2.0, tokens=14.0, model_flops=2e18)
    assert first.values_N().shape == (NUMBERS,)


def test_a_batch_that_is_given_up_is_forgotten_and_a_request_to_stop_is_not() -> None:
    numbers = RankNumbers(torch.device("cpu"))
    numbers.add("losses", 1.0)
    numbers.put("stop_request", 2.0)
    numbers.forget()
    assert read_sums(numbers.values_N().tolist()) == StepSums(0.0, stop_request=2.0)
    numbers.clear()
    assert read_sums(numbers.values_N().tolist()) == StepSums(0.0)
