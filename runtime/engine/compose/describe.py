"""A model's size as `dsrun plan` reads it: from a live model, or from one built on the meta device by name.

`python -m dsrun.runtime.engine.compose.describe MODULE:CALLABLE` prints it as JSON. Nothing is allocated: the launcher
runs this as a process of its own, for it needs torch and the user's code.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import nn

from dsrun.config.config import Config
from dsrun.contract.environment import digest_of
from dsrun.errors import DsrunError, ModelError
from dsrun.estimate.model.architecture import Architecture, from_transformers
from dsrun.estimate.model.units import ModelSize, UnitGroup

from ...layout.unit_layout import lay_out
from ...mesh.agree.texts import gather_texts
from ...mesh.join.groups import ProcessGroupMesh
from ...optim.groups import GroupAssignment
from ...parallel.pipeline.module import PipelineModule
from ...precision.configured import policy_of
from ...precision.fp32_modules import find_fp32_modules
from ...zero.units.find import KEPT, UnitSpec, find_frozen_units, find_units
from ...zero.units.leaves import mark_leaves
from ...zero.units.trained import is_trained, mark_left_out
from ...zero.units.unit import ParamUnit
from ..model.trained_units import trained_units

_GUESSED = "layers as the embedding and the repeated blocks suggest; the MLP taken to have no gate"


def describe(model: nn.Module, units: Sequence[UnitSpec] | None = None, *, label: str | None = None) -> ModelSize:
    """Describes a model that no engine has taken over yet.

    Args:
        model: model on any device, also the meta device.
        units: units of its trained parameters; None: those that it has without a config.
        label: name of the model; None: that of its class.
    """
    specs = find_units(model) if units is None else units
    whole = _left_whole(model)
    trained = [
        _TrainedUnit(
            s.name,
            s.module,
            _buffer_numel(s),
            s.dtype is not None,
            sum(param.numel() for name, param in s.params if name in whole),
        )
        for s in specs
    ]
    size = _describe(model, trained)
    return size if label is None else replace(size, label=label)


def describe_before_cut(
    model: nn.Module, assignment: GroupAssignment, settings: Config, mesh: ProcessGroupMesh
) -> ModelSize | None:
    """Returns the description of a whole model before it is cut into pipeline stages or layers, as an uncut one has it.

    Enters an all-reduce of a number and an all-gather of names over the pipe axis, where a `PipelineModule` has several
    stages: each rank knows of its own layers alone which are trained.

    Args:
        model: model of the script, or this rank's stage of a `PipelineModule`.
        assignment: optimizer groups of its parameters.
        settings: the config.
        mesh: ranks in their stages.

    Returns:
        the description, on the first rank; None on others, and where the model is not cut.
    """
    is_list = isinstance(model, PipelineModule)
    if not is_list and settings.pipeline.stages == "auto" and mesh.tensor.size == 1:
        return None
    mark_left_out(model, assignment.group_of)
    whole = model
    if is_list and mesh.spec.stages > 1:
        mine = json.dumps([name for name, param in model.named_parameters() if is_trained(param)])
        texts = gather_texts(mine, mesh.pipe, device=mesh.device, label="names of trained parameters")
        if not mesh.is_first:
            return None
        trained: set[str] = set().union(*map(json.loads, texts))
        whole = model.whole_on_meta()
        for name, param in whole.named_parameters():
            param.requires_grad_(name in trained)
    if not mesh.is_first:
        return None
    leaves = settings.zero_optimization.leaf_module
    mark_leaves(
        whole, classes=leaves.classes, names=leaves.names, name_suffixes=leaves.name_suffixes, say=_told_when_sharded
    )
    compute = policy_of(settings).compute
    kept = find_fp32_modules(whole, settings.data_types.keep_in_fp32_modules, compute=compute).tensors
    units = trained_units(whole, settings, compute=compute, kept=kept)
    return describe(whole, units, label=type(model).__name__)


def describe_units(model: nn.Module, units: Sequence[ParamUnit]) -> ModelSize:
    """Describes a model of an engine.

    Args:
        model: the engine's module.
        units: its trained parameters.
    """
    # The units have names as `find_units` gives them, cut by an axis or not.
    whole = _left_whole(model)
    trained = [
        _TrainedUnit(
            u.name,
            u.module,
            u.layout.numel,
            u.name.startswith(KEPT),
            sum(prod(extent.shape) for extent in u.layout.extents if extent.name in whole),
        )
        for u in units
    ]
    return _describe(model, trained)


def _left_whole(model: nn.Module) -> set[str]:
    """Returns the names of parameters that tensor parallelism leaves whole: all but those of Linears, tied ones too.

    Biases of layers that are summed over ranks stay whole as well; which these are, plans of layers alone know.
    """
    of_linears = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    return {name for name, param in model.named_parameters() if id(param) not in of_linears}


def hidden_size(model: nn.Module, units: Sequence[ParamUnit]) -> int | None:
    """Returns the width of an engine's model, by which `"auto"` sizes go; None where it does not show."""
    shape = describe_units(model, units).architecture
    return None if shape is None else shape.hidden


def start_record(size: ModelSize, *, world_size: int, stage: int) -> dict[str, Any]:
    """Returns the fields of a run's first record: by them `dsrun plan train.py` knows the script's model next time.

    Args:
        size: the model, with all pipeline stages.
        world_size: ranks of the job.
        stage: ZeRO stage.
    """
    return {
        "script": os.path.realpath(sys.argv[0]),
        "arguments": digest_of(sys.argv[1:]),
        "world_size": world_size,
        "stage": stage,
        "model": size.to_json(),
    }


def _told_when_sharded(text: str) -> None:
    """What a config names and the model does not have is told where the model is sharded."""


@dataclass(frozen=True, slots=True)
class _TrainedUnit:
    """What a description says of a unit of trained parameters.

    Attributes:
        name: name of the unit.
        module: module that uses the parameters; None for a rest unit.
        numel: elements of its buffer.
        kept: whether it stays in fp32 where the others have 16 bits.
        uncut: elements that tensor parallelism would leave whole.
    """

    name: str
    module: nn.Module | None
    numel: int
    kept: bool
    uncut: int


def _describe(model: nn.Module, trained: Sequence[_TrainedUnit]) -> ModelSize:
    units = _unit_groups(model, trained)
    shape, notes = _architecture(model, units)
    params = list(model.parameters())
    return ModelSize(
        label=type(model).__name__,
        units=_grouped(units),
        trained_numel=sum(param.numel() for param in params if is_trained(param)),
        frozen_numel=sum(param.numel() for param in params if not is_trained(param)),
        architecture=shape,
        notes=notes,
    )


def _unit_groups(model: nn.Module, trained: Sequence[_TrainedUnit]) -> list[UnitGroup]:
    """Puts trained and frozen parameters of each unit's module together, in order of registration; rest unit last."""
    sizes = {id(unit.module): unit for unit in trained if unit.module is not None}
    frozen = {id(spec.module): spec for spec in find_frozen_units(model)}
    groups: list[UnitGroup] = []
    for key in map(id, model.modules()):
        unit, spec = sizes.get(key), frozen.get(key)
        numel, uncut = (0, 0) if unit is None else (unit.numel, unit.uncut)
        if spec is not None:
            params = sum(param.numel() for _, param in spec.params)
            groups.append(UnitGroup(spec.name, numel, frozen=_buffer_numel(spec), frozen_numel=params, uncut=uncut))
        elif unit is not None:
            groups.append(UnitGroup(unit.name, numel, uncut=uncut))
    rest = [unit for unit in trained if unit.module is None]
    return [
        *groups,
        *(UnitGroup(unit.name, unit.numel, has_module=False, kept=unit.kept, uncut=unit.uncut) for unit in rest),
    ]


def _buffer_numel(spec: UnitSpec) -> int:
    return lay_out(spec.name, [(name, param.shape) for name, param in spec.params], world_size=1).numel


def _grouped(units: list[UnitGroup]) -> tuple[UnitGroup, ...]:
    """Puts equal neighbours together."""
    groups: list[UnitGroup] = []
    for _, same in groupby(units, key=lambda unit: replace(unit, name="")):
        members = list(same)
        groups.append(replace(members[0], count=len(members)))
    return tuple(groups)


def _architecture(model: nn.Module, units: list[UnitGroup]) -> tuple[Architecture | None, tuple[str, ...]]:
    """Returns the shape of the layers from the model's own config, else from its modules, and what was assumed."""
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        values = to_dict()
        if isinstance(values, Mapping):
            try:
                return from_transformers(values, source="the model's config"), ()
            except ModelError:
                pass  # not a decoder of the known kind; its modules may still tell
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    sizes = Counter(unit.numel + unit.frozen for unit in units if unit.has_module).most_common(1)
    blocks, layers = sizes[0] if sizes else (0, 0)
    if not embeddings or layers < 2:
        return None, ()
    tokens = max(embeddings, key=lambda module: module.num_embeddings)
    hidden = tokens.embedding_dim
    # Not `module.weight`: a parametrised layer computes that, at stage 3 from memory that is gone, and may count it.
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    heads = [param for module in linears for param in module.parameters(recurse=False)]
    return Architecture(
        layers=layers,
        hidden=hidden,
        intermediate=max(hidden, (blocks - 4 * hidden * hidden) // (2 * hidden)),
        heads=1,
        kv_heads=1,
        head_dim=hidden,
        vocab=tokens.num_embeddings,
        gated=False,
        tied=any(weight is tokens.weight for weight in heads),
        layer_norm=True,
    ), (_GUESSED,)


def build_on_meta(target: str) -> nn.Module:
    """Calls `MODULE:CALLABLE` without arguments, with every tensor on the meta device.

    Args:
        target: place of the callable as `MODULE:CALLABLE`; the module is found as `python -m` finds one, in the working
            folder first.

    Raises:
        ModelError: it cannot be imported or called, or returns something else than a module.
    """
    module_name, _, attribute = target.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            factory = getattr(factory, part)
        with torch.device("meta"):
            model = factory()
    except Exception as error:
        raise ModelError(
            f"`{target}` cannot be built on the meta device: {type(error).__name__}: {error}",
            hint="expected a function or class without arguments that returns a torch.nn.Module",
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"`{target}` returned {type(model).__name__}; expected a torch.nn.Module",
            hint="name a function or class that makes the model",
        )
    return model


def main() -> int:
    """Prints the description of the model named on the command line; what the model's code prints goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        size = describe(build_on_meta(sys.argv[1]))
    except DsrunError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    with os.fdopen(answer, "w") as file:
        json.dump(size.to_json(), file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
