"""All transformers models of text that have a plan for tensor parallelism, without edits: two ranks train as one.

`python -m support.tensor_families` in tests/ prints the table.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")

from support.decoder_families import one_of_each_kind
from support.tensor_families import families, result_of

#: What is refused, and a part of the reason. All five are plans that are wrong in their forward.
REFUSED = {
    "DogeConfig": "its forward fails",
    "EsmcConfig": "its forward fails",
    "Glm5NextTextConfig": "its forward fails",
    "InklingTextConfig": "output differs",
    "NeoMMEConfig": "its forward fails",
}


@pytest.mark.parametrize(
    "whole",
    [
        False,
        pytest.param(
            True,
            marks=[
                pytest.mark.soak("one model of each set of styles, and all that are refused"),
                pytest.mark.timeout(600),
            ],
        ),
    ],
    ids=["one of each kind", "all"],
)
@pytest.mark.filterwarnings("ignore")  # of models' own code
def test_every_model_of_text_with_a_plan_trains_as_on_one_rank_or_is_refused_with_the_reason(whole: bool) -> None:
    configs = families() if whole else one_of_each_kind(families(), also=REFUSED)
    found = {name: result_of(config) for name, config in configs.items()}
    assert len(found) > (100 if whole else 20)
    refused = {name: result for name, result in found.items() if result.startswith("refused: ")}
    assert {name: result for name, result in found.items() if result != "passes" and name not in refused} == {}
    assert {name: result for name, result in refused.items() if REFUSED.get(name, "\0") not in result} == {}
    if whole:
        assert len(found) - len(refused) >= 0.95 * len(found)
