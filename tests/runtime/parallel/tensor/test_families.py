"""All transformers models of text that have a plan for tensor parallelism, without edits: two ranks train as one.

`python -m support.tensor_families` in tests/ prints the table.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")

from support.tensor_families import families, result_of

#: What is refused, and a part of the reason. All five are plans that are wrong in their forward.
REFUSED = {
    "DogeConfig": "its forward fails",
    "EsmcConfig": "its forward fails",
    "Glm5NextTextConfig": "its forward fails",
    "InklingTextConfig": "output differs",
    "NeoMMEConfig": "its forward fails",
}


@pytest.mark.filterwarnings("ignore")  # of models' own code
def test_every_model_of_text_with_a_plan_trains_as_on_one_rank_or_is_refused_with_the_reason() -> None:
    found = {name: result_of(config) for name, config in families().items()}
    assert len(found) > 100
    refused = {name: result for name, result in found.items() if result.startswith("refused: ")}
    assert {name: result for name, result in found.items() if result != "passes" and name not in refused} == {}
    assert {name: result for name, result in refused.items() if REFUSED.get(name, "\0") not in result} == {}
    assert len(found) - len(refused) >= 0.95 * len(found)
