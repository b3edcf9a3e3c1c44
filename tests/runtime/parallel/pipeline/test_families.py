"""All transformers decoders that have a plan for pipeline stages, without edits: two stages give the bits of one.

`python -m support.decoder_families` in tests/ prints the table.
"""

from __future__ import annotations

import pytest

from support.decoder_families import decoders, one_of_each_kind, results

pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")


#: What is refused, and a part of the reason.
REFUSED = {
    "EmbeddingGemma2TextConfig": "carries gradients beside its hidden states",
    "Gemma3nTextConfig": "carries gradients beside its hidden states",
    "Gemma4TextConfig": "carries gradients beside its hidden states",
    "HrmTextConfig": "several stacks of blocks",
    "Phi4MultimodalConfig": "several stacks of blocks",
}


@pytest.mark.parametrize(
    "whole",
    [False, pytest.param(True, marks=pytest.mark.soak("one decoder of each kind of plan, and all that are refused"))],
    ids=["one of each kind", "all"],
)
@pytest.mark.filterwarnings("ignore")  # of models' own code
def test_every_decoder_with_a_plan_has_the_bits_of_one_stage_or_is_refused_with_the_reason(whole: bool) -> None:
    found = results(decoders() if whole else one_of_each_kind(decoders(), also=REFUSED))
    assert len(found) > (100 if whole else 20)
    refused = {name: result for name, result in found.items() if result.startswith("refused: ")}
    wrong = {name: result for name, result in found.items() if result != "passes" and name not in refused}
    assert not wrong
    assert {name: result for name, result in refused.items() if REFUSED.get(name, "\0") not in result} == {}
    if whole:
        assert len(found) - len(refused) >= 0.95 * len(found)
