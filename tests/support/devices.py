"""Cases of a test for the CPU, all of them, and for a GPU, some: a machine with a GPU is lent for minutes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def on_devices(
    cases: Iterable[Any], *, on_gpu: Collection[Any], soak: Collection[Any] = (), stands: str = ""
) -> list[Any]:
    """Returns every case for the CPU, and those of `on_gpu` for a CUDA GPU too.

    For `parametrize(("device", ...), ..., indirect=["device"])`: the fixture `device` makes a device of a name.

    Args:
        cases: values, or tuples of them.
        on_gpu: the cases that differ there in what they use.
        soak: the cases that are left out on the CPU by default.
        stands: reason of the mark, which says what stands for these.

    Raises:
        ValueError: a case of `on_gpu` or `soak` is none of the cases.
    """
    every = list(cases)
    if unknown := [case for case in (*on_gpu, *soak) if case not in every]:
        raise ValueError(f"no such cases: {unknown}")
    rows = {case: case if isinstance(case, tuple) else (case,) for case in every}
    found = [
        pytest.param(
            "cpu",
            *row,
            id="-".join(["cpu", *map(_word, row)]),
            marks=[pytest.mark.soak(stands)] if case in soak else [],
        )
        for case, row in rows.items()
    ]
    return found + [
        pytest.param("cuda", *rows[case], id="-".join(["cuda", *map(_word, rows[case])]), marks=pytest.mark.cuda)
        for case in on_gpu
    ]


def _word(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)
