"""What an engine has taken over, and whether it is still so: looked at once a step, before the update.

A model may change in many ways behind its engine's back, and most of them would not show but in the weights.

[Note: how it looks] Parameters know their module, name, memory and whether they are trained: that takes some
comparisons a parameter and step. Only where a module has another parameter or child than before is the model walked
through, for it may be the same one in another wrapper (`torch.compile`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from dsrun.errors import DsrunError, ModelError

from ...compat import without_overrides
from ...zero.access.pieces import OTHER_MEMORY_HINT, other_memory
from ...zero.partition_parameters import home_of, is_zero_param, memory_of


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter as it was: by whom it is held under which name, where its values are, and whether it is trained."""

    attributes: dict[str, Any]
    key: str
    name: str
    param: nn.Parameter
    address: int
    trained: bool


class ModelGuard:
    """A model as its engine took it over.

    Args:
        model: model with its parameters in the memory that the engine gave them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = {id(param): param for param in model.parameters()}
        self._note()

    def check(self) -> None:
        """Looks whether the engine still has what it took, see [Note: how it looks].

        Raises:
            ModelError: a parameter has been frozen, unfrozen, converted, moved, or is none of those that were there.
        """
        if self._is_rebuilt():
            self._check_strangers()
            self._note()
        with without_overrides():  # or torch would ask the classes of parameters that are not in use
            for place in self._places:
                param = place.param
                if param.requires_grad is not place.trained:
                    _refuse_other_training(place)
                if _has_moved(place) and not _is_brought_back(place):
                    _refuse_moved(place)

    def check_memory(self) -> None:
        """Looks only whether parameters have the memory that the engine gave them.

        Raises:
            ModelError: a parameter has been converted or moved.
        """
        for place in self._places:
            if _has_moved(place):
                _refuse_moved(place)

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Names the parameter where an error of torch inside comes of its having been converted or moved.

        Forward and backward meet such parameters before the step looks for them, and cannot say whose mistake it is.

        Raises:
            ModelError: as `check_memory` does, instead of the error.
        """
        try:
            yield
        except DsrunError:
            raise
        except RuntimeError:
            self.check_memory()
            raise

    def _note(self) -> None:
        self._sizes: list[tuple[dict[str, Any], int, int]] = []
        self._children: list[tuple[dict[str, Any], str, nn.Module]] = []
        self._places: list[_Place] = []
        seen: set[int] = set()
        for prefix, module in self._model.named_modules():
            attributes = module.__dict__
            children: dict[str, nn.Module] = attributes["_modules"]
            self._sizes.append((attributes, len(attributes["_parameters"]), len(children)))
            self._children += [(children, key, child) for key, child in children.items()]
            for key, param in module.named_parameters(recurse=False):
                if id(param) not in seen:
                    seen.add(id(param))
                    name = f"{prefix}.{key}" if prefix else key
                    place = _Place(attributes, key, name, param, param.data_ptr(), param.requires_grad)
                    self._places.append(place)

    def _is_rebuilt(self) -> bool:
        return (
            any(
                len(attributes["_parameters"]) != params or len(attributes["_modules"]) != children
                for attributes, params, children in self._sizes
            )
            or any(children.get(key) is not child for children, key, child in self._children)
            or any(place.attributes["_parameters"].get(place.key) is not place.param for place in self._places)
        )

    def _check_strangers(self) -> None:
        for name, param in self._model.named_parameters():
            if param.requires_grad and id(param) not in self._known:
                raise ModelError(
                    f"model: `{name}` has come since the engine was made, so it would not be trained",
                    hint="change the model before dsrun.initialize; a checkpoint of one engine loads into the next one "
                    "with load_module_strict=False",
                )


def _has_moved(place: _Place) -> bool:
    param = place.param
    is_view = place.trained or is_zero_param(param)
    return is_view and param.data_ptr() != place.address and not _is_open(param)


def _is_brought_back(place: _Place) -> bool:
    """Whether the values of a parameter that a script gave other memory are where the engine's are."""
    home = home_of(place.param)
    return home is not None and home.bring_back() and not _has_moved(place)


def _is_open(param: nn.Parameter) -> bool:
    home = home_of(param)
    return home is not None and home.is_open


def _refuse_other_training(place: _Place) -> NoReturn:
    if place.trained:
        raise ModelError(
            f"model: `{place.name}` was trained when the engine was made and has been frozen since; momentum and "
            "weight decay would change it all the same",
            hint="set requires_grad before dsrun.initialize, or give the parameters to freeze a group of their own and "
            "set its lr to 0 for as long",
        )
    raise ModelError(
        f"model: `{place.name}` was frozen when the engine was made and has been unfrozen since, so it would not be "
        "trained",
        hint="set requires_grad before dsrun.initialize; a checkpoint of one engine loads into the next one",
    )


def _refuse_moved(place: _Place) -> NoReturn:
    raise ModelError(other_memory(place.name, memory_of(place.param)), hint=OTHER_MEMORY_HINT)
