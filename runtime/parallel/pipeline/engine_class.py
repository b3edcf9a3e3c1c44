"""DeepSpeed's class of engines with pipeline stages, to ask for by `isinstance`, and its error. Nothing runs here."""

from __future__ import annotations

from typing import Any, NoReturn

from dsrun.errors import ModelError

#: Attribute of an engine that says which of DeepSpeed's classes it would be.
_NOTE = "deepspeed_class"


class PipelineError(ModelError):
    """An engine with pipeline stages is used as one without."""


class _NotedOnEngine(type):
    """The class whose instances are the engines of which `note_stages` was told."""

    def __instancecheck__(cls, instance: object) -> bool:
        return getattr(instance, "__dict__", {}).get(_NOTE) == cls.__name__

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(
            f"{cls.__name__}: it is for isinstance alone", hint="give `initialize` a PipelineModule, which makes one"
        )


class PipelineEngine(metaclass=_NotedOnEngine):
    """Any engine whose model is in pipeline stages, one stage too."""


def note_stages(engine: object) -> None:
    """Says of an engine that its model is in pipeline stages: `isinstance(engine, PipelineEngine)` holds from then on.

    Args:
        engine: engine that the script is handed.
    """
    setattr(engine, _NOTE, PipelineEngine.__name__)
