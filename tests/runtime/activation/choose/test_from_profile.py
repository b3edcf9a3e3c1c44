"""Plans for made-up measurements."""

from __future__ import annotations

import pytest
import torch

from dsrun.errors import ModelError
from dsrun.runtime.activation.choose.budget import Cost
from dsrun.runtime.activation.choose.from_profile import block_costs, solve_measured
from dsrun.runtime.activation.choose.policy import Treatment
from dsrun.runtime.activation.choose.profile import CallFigures

KIB = 1024
CPU = torch.device("cpu")


def block(*, kept: int = KIB, dropped: int = 16 * KIB, again_s: float = 1.0) -> CallFigures:
    return CallFigures(kept, dropped, [again_s], [9 * again_s, again_s, again_s])


def test_costs_are_the_bytes_and_the_median_seconds_that_were_measured() -> None:
    found = block_costs(block(), move_s=2e-6, pack_s=1e-6)
    assert found.live_bytes == 16 * KIB
    assert found.costs == {
        Treatment.KEEP: Cost(16 * KIB, 0.0),
        Treatment.RECOMPUTE: Cost(KIB, 1.0),
        Treatment.MOVE: Cost(0, 16 * KIB * 2e-6),
        Treatment.PACK: Cost((16 * KIB + 16 * KIB // 128 * 4) // 2, 16 * KIB * 1e-6),
    }


def test_only_what_is_allowed_is_considered() -> None:
    assert set(block_costs(block(), move_s=None, pack_s=None).costs) == {Treatment.KEEP, Treatment.RECOMPUTE}


def test_four_blocks_are_recomputed_at_the_front_as_far_as_the_budget_asks() -> None:
    # Two inputs and two whole blocks; a byte less, and one more block is recomputed.
    for budget, recomputed in ((64 * KIB, 0), (34 * KIB, 2), (34 * KIB - 1, 3), (19 * KIB, 3), (19 * KIB - 1, None)):
        if recomputed is None:
            with pytest.raises(ModelError, match=r"memory_budget` is 19455 .*; the blocks need 19.0 KiB at least"):
                solve_measured([block()] * 4, budget, device=CPU, may_move=False, may_pack=False)
            continue
        found = solve_measured([block()] * 4, budget, device=CPU, may_move=False, may_pack=False)
        assert found.treatments == (Treatment.RECOMPUTE,) * recomputed + (Treatment.KEEP,) * (4 - recomputed)
        assert found.seconds == recomputed


def test_a_block_that_is_slow_to_run_again_is_moved_where_that_is_allowed() -> None:
    # An hour a run beside a copy of 16 KiB: whatever the machine, the copy is faster.
    blocks = [block(again_s=3600.0), block(again_s=0.0)]
    found = solve_measured(blocks, 17 * KIB, device=CPU, may_move=True, may_pack=False)
    assert found.treatments[0] is Treatment.MOVE
    found = solve_measured(blocks, 17 * KIB, device=CPU, may_move=False, may_pack=False)
    assert found.treatments[0] is Treatment.RECOMPUTE


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1)
def test_a_gpus_copies_are_measured_over_memory_of_which_torch_keeps_nothing() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def torchs_bytes() -> int:
        stats = getattr(torch.cuda, "host_memory_stats", dict)()
        return int(stats.get("allocated_bytes.current", 0))

    torch.ones(1, device=device).item()  # which takes the memory that answers come through
    before = torchs_bytes()
    found = solve_measured([block(again_s=3600.0)] * 2, 17 * KIB, device=device, may_move=True, may_pack=True)
    assert Treatment.RECOMPUTE not in found.treatments
    assert torchs_bytes() == before
