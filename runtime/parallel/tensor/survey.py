"""What a plan means for one model: which parameters and modules are cut how, and what stands in the way.

Cuts nothing.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from functools import cache

from torch import nn

from dsrun.errors import Problem

from ...mesh.collectives import Collectives
from .fronts import is_plain
from .heads import GROUP_SIZE, Heads, heads_of
from .styles import EVEN, Deal, Form, ModelPlan, Style, cut_dim

_HINT = "name a style that fits in `tensor_parallel.partition_config`, or `skip` it"
_TIE_HINT = (
    "give both names rules of `tensor_parallel.partition_config` that cut the same dim alike (an Embedding's row and a "
    "Linear's column cut the vocabulary), or `skip` both"
)
_USE_HINT = (
    'leave it whole by a rule with "partition_type": "skip" in `tensor_parallel.partition_config`, or call a module '
    "that has the weight: a Linear with `lm_head.weight = embed.weight` is cut with the embedding"
)
#: What of a weight is the same for a part of it.
_OF_ANY_PART = r"\.(?:dtype|device|requires_grad|is_cuda|ndim|dim\()"


@dataclass(slots=True)
class ParamCut:
    """How one parameter is cut, and by which names."""

    param: nn.Parameter
    names: list[str]
    dim: int
    deal: Deal


@dataclass(slots=True)
class ModuleCut:
    """How one module is cut."""

    name: str
    module: nn.Module
    style: Style
    deal: Deal = EVEN
    rows: tuple[int, int] | None = None
    params: dict[str, tuple[int, Deal, int]] = field(default_factory=dict[str, tuple[int, Deal, int]])


class Survey:
    """What is to be cut, before anything is; `problems` are what stands in the way."""

    def __init__(self, model: nn.Module, plan: ModelPlan, axis: Collectives, *, exact: bool) -> None:
        self._model, self._plan, self._axis, self._exact = model, plan, axis, exact
        self.problems: list[Problem] = []
        self.modules: list[ModuleCut] = []
        self.params: dict[int, ParamCut] = {}
        self.partial: list[nn.Parameter] = []
        self._attributes: dict[tuple[str, str], int] = {}
        self._heads: dict[str, Heads | None] = {}
        seen: set[int] = set()
        for name, module in model.named_modules():
            style = plan.modules.get(name)
            if id(module) in seen:
                continue
            seen.add(id(module))
            self._look(name, module, style)
        self._check_tied()
        self._check_uses()
        for name, attributes in plan.attributes.items():
            for attribute in attributes:
                self._divide(name, attribute)

    def columns_by_parent(self) -> dict[str, list[nn.Module]]:
        """Returns the columns that each module has as its own children, by the module's name."""
        found: dict[str, list[nn.Module]] = {}
        for one in self.modules:
            if one.style.form is Form.COLUMN:
                found.setdefault(parent_of(one.name), []).append(one.module)
        return found

    def set_attributes(self) -> None:
        """Gives modules the numbers of what they have on this rank."""
        for (name, attribute), value in self._attributes.items():
            setattr(module_at(self._model, name), attribute, value)

    def _refuse(self, name: str, module: nn.Module, reason: str, hint: str = _HINT) -> None:
        source = self._plan.source
        self.problems.append(Problem(f"model: `{name}` ({type(module).__name__}) {reason} (plan of {source})", hint))

    def _look(self, name: str, module: nn.Module, style: Style | None) -> None:
        own = dict(module.named_parameters(recurse=False))
        apart = {key: self._plan.parameters[full] for key in own if (full := _join(name, key)) in self._plan.parameters}
        if style is None or style.form is Form.WHOLE:
            for key, its in apart.items():
                self._add_param(name, module, key, its, EVEN)
            return
        if style.form is Form.PARTIAL_GRADIENT:
            self.partial += own.values()
            return
        cut = ModuleCut(name, module, style)
        if style.form in (Form.COLUMN, Form.ROW) and not self._prepare_linear(cut):
            return
        if style.form in (Form.VOCABULARY, Form.HIDDEN) and not isinstance(module, nn.Embedding):
            self._refuse(name, module, f"is no Embedding, and is to be cut as {style.form.value}")
            return
        for option in ("max_norm", "scale_grad_by_freq"):
            if isinstance(module, nn.Embedding) and getattr(module, option):
                self._refuse(name, module, f"has {option}, which needs whole vectors and what is looked up")
                return
        if cut.rows is not None:
            self.partial += own.values()
        else:
            for key in own:
                placed = self._add_param(name, module, key, apart.get(key, style), cut.deal)
                if placed is not None:
                    cut.params[key] = placed
        if style.form is Form.EXPERTS and not cut.params and not self._has_cut_inside(name):
            return
        self.modules.append(cut)

    def _prepare_linear(self, cut: ModuleCut) -> bool:
        """Finds how a Linear's length is dealt; whether it can be cut."""
        name, module, style = cut.name, cut.module, cut.style
        weight = getattr(module, "weight", None)
        is_other = isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"
        if is_other or not isinstance(weight, nn.Parameter) or weight.dim() != 2:
            self._refuse(name, module, f"is no Linear, and is to be cut as {style.form.value}")
            return False
        has_bias = getattr(module, "bias", None) is not None
        if style.form is Form.ROW and has_bias and not is_plain(type(module)):
            self._refuse(name, module, "has a forward of its own, which adds the bias once a rank")
            return False
        if style.gathers_output or style.splits_input:
            cut.deal = Deal(style.parts)
            return True
        heads = self._heads_around(name)
        if heads is None:
            cut.deal = Deal(style.parts)
            return True
        size = self._axis.size
        if heads.repeats(size) and (size % heads.keys or heads.queries % size):
            self._refuse(
                name,
                module,
                f"has {heads.queries} heads of queries and {heads.keys} of keys, which {size} ranks cannot share",
                f"use a size that divides {heads.queries}, and is a multiple or a divisor of {heads.keys}",
            )
            return False
        length = weight.shape[0 if style.form is Form.COLUMN else 1]
        lengths = [length // style.parts] * style.parts if isinstance(style.parts, int) else list(style.parts)
        if heads.repeats(size) and style.form is Form.COLUMN:
            repeated = self._repeated_rows(cut, heads, length)
            if repeated is None:
                return False
            cut.rows = repeated or None
            if cut.rows is not None:
                return True
        groups = heads.groups(size)
        cut.deal = Deal(style.parts, groups if all(part % groups == 0 for part in lengths) else None)
        return True

    def _repeated_rows(self, cut: ModuleCut, heads: Heads, length: int) -> tuple[int, int] | tuple[()] | None:
        """Returns the rows of keys or values that this rank uses; () for queries; None where it cannot be."""
        name, module, size = cut.name, cut.module, self._axis.size
        per_key, rest = divmod(length, heads.keys)
        parent = module_at(self._model, parent_of(name))
        # As long as the queries' heads: they are these.
        head_dim = getattr(parent, "head_dim", None)
        is_queries = isinstance(head_dim, int) and head_dim and length // head_dim == heads.queries
        if is_queries and heads.queries != heads.keys:
            return ()
        if rest or cut.style.parts != 1 or not is_plain(type(module)):
            self._refuse(
                name,
                module,
                f"has {heads.keys} heads of keys for {size} ranks, and is not built so that several can use one",
                f"use a tensor-parallel size of at most {heads.keys}",
            )
            return None
        if self._exact:
            self._refuse(name, module, "repeats heads, of which the exact mode knows nothing", "leave `exact` out")
            return None
        if isinstance(getattr(parent, GROUP_SIZE, None), int):
            self._attributes[parent_of(name), GROUP_SIZE] = heads.queries // size
        first = self._axis.rank * heads.keys // size * per_key
        return first, first + per_key

    def _add_param(
        self, name: str, module: nn.Module, key: str, style: Style, deal: Deal
    ) -> tuple[int, Deal, int] | None:
        """Notes that a parameter is cut, and returns how; None where each rank has it whole."""
        param = dict(module.named_parameters(recurse=False))[key]
        full = _join(name, key)
        if style.form is Form.PARTIAL_GRADIENT:
            self.partial.append(param)
            return None
        dim = cut_dim(style.form, param.dim(), is_embedding=isinstance(module, nn.Embedding))
        if dim is None or param.dim() == 0:
            return None
        length = param.shape[dim]
        given = deal if deal != EVEN else Deal(style.parts)
        if isinstance(given.parts, int) and length % given.parts:
            self._refuse(full, module, f"has {length} along dim {dim}, which is no {given.parts} equal parts")
            return None
        if isinstance(given.parts, tuple) and sum(given.parts) != length:
            lengths = " + ".join(map(str, given.parts))
            self._refuse(full, module, f"has {length} along dim {dim}, which is not {lengths}")
            return None
        ranks = [given.runs(length, rank=rank, size=self._axis.size) for rank in range(self._axis.size)]
        if not all(ranks):
            self._refuse(full, module, f"has {length} along dim {dim}, too few for {self._axis.size} ranks")
            return None
        known = self.params.get(id(param))
        if known is not None and (known.dim, known.deal) != (dim, given):
            other = known.names[0]
            self._refuse(full, module, f"is one weight with `{other}`, which is cut in another way", _TIE_HINT)
        if known is None:
            self.params[id(param)] = ParamCut(param, [full], dim, given)
        else:
            known.names.append(full)
        return dim, given, length

    def _check_tied(self) -> None:
        """Refuses a weight that is cut by one of its names alone: by the others, a part would be used as the whole."""
        for name, module in self._model.named_modules():
            for key, param in module.named_parameters(recurse=False):
                cut, full = self.params.get(id(param)), _join(name, key)
                if cut is not None and full not in cut.names:
                    reason = f"is one weight with `{cut.names[0]}`, which is cut, and stays whole itself"
                    self._refuse(full, module, reason, _TIE_HINT)

    def _check_uses(self) -> None:
        """Refuses a cut weight that a forward reads past its module, as `F.linear(x, self.embed.weight)` does.

        Only the text of forwards is read, for attributes of `self`.
        """
        for name in [name for cut in self.params.values() for name in cut.names]:
            path = name.split(".")
            for depth in range(len(path) - 2, -1, -1):
                if path[depth].isdigit():
                    break  # a list's: no text has its number
                around = module_at(self._model, ".".join(path[:depth]))
                read = None if around is None else _read_in(type(around), ".".join(path[depth:]))
                if read is not None:
                    reason = f"is cut, and the forward of {type(around).__name__} uses `{read}` by itself, a part here"
                    owner = module_at(self._model, parent_of(name))
                    assert owner is not None, "it has the parameter"
                    self._refuse(name, owner, reason, _USE_HINT)

    def _has_cut_inside(self, name: str) -> bool:
        return any(key.startswith(f"{name}.") for key in (*self._plan.modules, *self._plan.parameters))

    def _heads_around(self, name: str) -> Heads | None:
        """Returns the heads of the closest module around a Linear that has some; blocks and models have none."""
        parent = parent_of(name)
        if parent not in self._heads:
            around = module_at(self._model, parent)
            self._heads[parent] = None if around is None else heads_of(around)
        return self._heads[parent]

    def _divide(self, name: str, attribute: str) -> None:
        module = module_at(self._model, name)
        value = getattr(module, attribute, None)
        if module is None or not isinstance(value, int):
            return
        if value % self._axis.size:
            self._refuse(name, module, f"has {attribute} {value}, which is no multiple of {self._axis.size} ranks")
            return
        self._attributes[name, attribute] = value // self._axis.size


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    """Returns a module by its qualified name; None where there is none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def parent_of(name: str) -> str:
    """Returns the qualified name of the module around another one; empty for the model."""
    return name.rpartition(".")[0]


@cache
def _read_in(kind: type[nn.Module], attribute: str) -> str | None:
    """Returns how the forward of a class reads the values of an attribute by its text; None where it does not."""
    forward = inspect.unwrap(kind.forward)
    try:
        text = inspect.getsource(forward)
    except (OSError, TypeError):
        return None  # no text: what happens is seen by the comparison of the first forward
    read = f"{next(iter(inspect.signature(forward).parameters), 'self')}.{attribute}"
    is_read = re.search(rf"(?<!isinstance\()\b{re.escape(read)}\b(?!{_OF_ANY_PART}|\s+is\b)", text)
    return None if is_read is None else read


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
