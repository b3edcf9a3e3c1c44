"""A model as memory sees it: units of parameters, and the shape of its layers where that is known.

[Note: units] of the runtime: each block is gathered, reduced and updated as one; embedding and head apart; small
leftovers and tied weights form a last unit without a module. What a unit costs is decided by its elements alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dsrun.errors import ModelError
from dsrun.estimate.model.architecture import Architecture
from dsrun.units import format_count


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """Equal units in a row.

    Attributes:
        name: name of the first unit.
        numel: trained elements of each, gaps between tensors included.
        count: number of units.
        has_module: whether they are the parameters of one module, so that at stage 3 they take turns in slots.
        frozen: elements of the frozen parameters of each one's module, which stage 3 cuts as well, gaps included.
        frozen_numel: those parameters without gaps.
        kept: whether the units stay in fp32 where the others have 16 bits.
        chunk: position of their chunk among those of a pipeline stage.
        uncut: trained elements of each that tensor parallelism leaves whole: norms, an embedding.
        repeated: trained elements of each that it leaves whole for ranks that each use a part: projections of keys and
            values with fewer heads than ranks.
        stages: pipeline stages that have the unit.
    """

    name: str
    numel: int
    count: int = 1
    has_module: bool = True
    frozen: int = 0
    frozen_numel: int = 0
    kept: bool = False
    chunk: int = 0
    uncut: int = 0
    repeated: int = 0
    stages: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model before it exists.

    Attributes:
        label: name of the model in messages and tables.
        units: its trained parameters, in order.
        trained_numel: parameters that are trained.
        frozen_numel: parameters that are not, in a unit or not.
        architecture: shape of its layers; None where it is not known, and activations then neither.
        notes: assumptions that were made, in words.
    """

    label: str
    units: tuple[UnitGroup, ...]
    trained_numel: int
    frozen_numel: int = 0
    architecture: Architecture | None = None
    notes: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """All parameters."""
        return self.trained_numel + self.frozen_numel

    def with_trained(self, numel: int) -> ModelSize:
        """Returns the model with all but `numel` parameters frozen, as with adapters, spread over its units evenly.

        What a unit with a module no longer trains is frozen in it.

        Raises:
            ModelError: the model has fewer parameters.
        """
        if numel > self.numel:
            raise ModelError(
                f"`--trained {format_count(numel)}` is more than the model's {format_count(self.numel)} parameters"
            )
        share = numel / max(1, self.trained_numel)
        units = tuple(_freeze(unit, share) for unit in self.units)
        units = units or (UnitGroup("adapters", max(1, numel)),)
        return replace(self, units=units, trained_numel=numel, frozen_numel=self.numel - numel)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values, of which `from_json` makes the model again."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSize:
        """Reads what `to_json` wrote.

        Raises:
            ModelError: it is something else.
        """
        try:
            shape = data["architecture"]
            return cls(
                label=str(data["label"]),
                units=tuple(
                    UnitGroup(
                        str(unit["name"]),
                        int(unit["numel"]),
                        int(unit["count"]),
                        bool(unit["has_module"]),
                        int(unit.get("frozen", 0)),  # records of older versions have none
                        int(unit.get("frozen_numel", 0)),
                        bool(unit.get("kept", False)),
                        uncut=int(unit.get("uncut", 0)),
                    )
                    for unit in data["units"]
                ),
                trained_numel=int(data["trained_numel"]),
                frozen_numel=int(data["frozen_numel"]),
                architecture=None if shape is None else Architecture(**shape),
                notes=tuple(str(note) for note in data["notes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"the description of a model cannot be read: {type(error).__name__}: {error}") from error


def _freeze(unit: UnitGroup, share: float) -> UnitGroup:
    """Returns the unit with `share` of its trained parameters left, at least one."""
    left = min(unit.numel, max(1, round(unit.numel * share)))
    frozen = unit.numel - left if unit.has_module else 0
    uncut = round(unit.uncut * left / max(1, unit.numel))
    return replace(unit, numel=left, frozen=unit.frozen + frozen, frozen_numel=unit.frozen_numel + frozen, uncut=uncut)


_COUNT = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)(?P<unit>[kmbtKMBT])")
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _gpt(layers: int, hidden: int, heads: int, positions: int) -> Architecture:
    return Architecture(
        layers=layers,
        hidden=hidden,
        intermediate=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=50257,
        gated=False,
        tied=True,
        layer_norm=True,
        qkv_bias=True,
        other_bias=True,
        positions=positions,
    )


def _llama(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, *, tied: bool = False
) -> Architecture:
    return Architecture(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab=vocab,
        tied=tied,
    )


#: Published shapes that a bare number of parameters is taken to resemble: from the models' own config.json; GPT-3 from
#: Brown et al., 2020, table 2.1.
_KNOWN: Mapping[str, Architecture] = {
    "GPT-2": _gpt(12, 768, 12, 1024),
    "GPT-2 medium": _gpt(24, 1024, 16, 1024),
    "TinyLlama 1.1B": _llama(22, 2048, 5632, 32, 4, 32000),
    "Llama 3.2 3B": _llama(28, 3072, 8192, 24, 8, 128256, tied=True),
    "Llama 2 7B": _llama(32, 4096, 11008, 32, 32, 32000),
    "Llama 3.1 8B": _llama(32, 4096, 14336, 32, 8, 128256),
    "Llama 2 13B": _llama(40, 5120, 13824, 40, 40, 32000),
    "Code Llama 34B": _llama(48, 8192, 22016, 64, 8, 32000),
    "Llama 3 70B": _llama(80, 8192, 28672, 64, 8, 128256),
    "GPT-3 175B": _gpt(96, 12288, 96, 2048),
    "Llama 3.1 405B": _llama(126, 16384, 53248, 128, 8, 128256),
}
#: A model this many times larger or smaller than a known one still has its width.
_SAME_WIDTH = 1.5


def parse_count(text: str) -> int | None:
    """Reads `7B`, `350M` or `1.3b` as a number of parameters; None where the text is nothing of the kind."""
    match = _COUNT.fullmatch(text)
    return None if match is None else round(float(match["number"]) * _UNITS[match["unit"].upper()])


def from_count(numel: int) -> ModelSize:
    """Makes a model of a number of parameters, with the proportions of the published model nearest in size.

    Args:
        numel: parameters, at least 1.
    """
    name, known = min(_KNOWN.items(), key=lambda item: abs(math.log(item[1].numel / max(1, numel))))
    ratio = numel / known.numel
    shape = known
    if not 1 / _SAME_WIDTH < ratio < _SAME_WIDTH:
        width = max(known.head_dim, round(known.hidden * math.sqrt(ratio) / known.head_dim) * known.head_dim)
        heads = width // known.head_dim
        shape = replace(
            known,
            hidden=width,
            intermediate=round(known.intermediate * width / known.hidden),
            heads=heads,
            kv_heads=min(known.kv_heads, heads),
        )
    model = from_architecture(known, label=format_count(numel))
    units = tuple(
        replace(unit, numel=max(1, round(unit.numel * ratio)), uncut=round(unit.uncut * ratio)) for unit in model.units
    )
    note = f"the number says no more than the size: layers as in {name} ({shape.layers} of width {shape.hidden})"
    return replace(model, units=units, trained_numel=numel, architecture=shape, notes=(note,))


def from_architecture(shape: Architecture, *, label: str) -> ModelSize:
    """Cuts a transformer into the units that the runtime makes of it.

    Args:
        shape: the transformer.
        label: name of the model in messages and tables.
    """
    rest = shape.norm_numel
    embedding = shape.embedding_numel
    units: list[UnitGroup] = []
    if shape.tied:
        rest += embedding  # used in two places, so needed from the first to the last
    else:
        units.append(UnitGroup("embedding", embedding, uncut=embedding))
    if shape.positions:
        positions = shape.positions * shape.hidden
        units.append(UnitGroup("positions", positions, uncut=positions))
    units.append(UnitGroup("blocks", shape.block_numel, count=shape.layers, uncut=shape.uncut_block_numel))
    if not shape.tied:
        units.append(UnitGroup("head", embedding))
    units.append(UnitGroup("rest", rest, has_module=False, uncut=shape.norm_numel))
    return ModelSize(label=label, units=tuple(units), trained_numel=shape.numel, architecture=shape)
