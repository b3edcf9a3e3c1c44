"""Scripts tell engines with stages by DeepSpeed's class."""

from __future__ import annotations

import pytest

from dsrun.errors import ModelError
from dsrun.runtime.parallel.pipeline.engine_class import PipelineEngine, PipelineError, note_stages


class Engine:
    pass


def test_an_engine_is_of_the_class_once_it_is_noted() -> None:
    engine, other = Engine(), Engine()
    note_stages(engine)
    assert isinstance(engine, PipelineEngine)
    assert not isinstance(other, PipelineEngine)
    assert not isinstance(3, PipelineEngine)


def test_the_class_makes_no_engine() -> None:
    with pytest.raises(ModelError, match="PipelineEngine: it is for isinstance alone"):
        PipelineEngine()


def test_the_error_is_one_of_the_model() -> None:
    assert issubclass(PipelineError, ModelError)
