"""Values by name into a model, wherever its parameters are: each rank takes what it owns, and reads no more.

`load_pretrained` for files of safetensors, before or after `dsrun.initialize`; `assign` for any source of values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from dsrun.errors import CheckpointError, InputError, Problem

from ...mesh.agree.all_or_none import all_or_none
from ..access.over_axes import read_part
from ..access.pieces import UnitHome
from ..access.torn import WEIGHTS
from ..access.whole import ParamAccess
from ..partition_parameters import home_of, settle, unsettle
from .stored_files import StoredHome, StoredTensor, find_tensors
from .unbuilt import UnbuiltOwner


class Source(Protocol):
    """Values of one tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """Returns the row-major elements [start, stop), flat, in any dtype."""
        ...


def load_pretrained(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Loads safetensors files into a model; every rank must call.

    The model may be built on the meta device or inside `zero.Init`, may have an engine (then masters are set, and
    optimizer states stay), or be a plain one. Parameters on the meta device are read by `dsrun.initialize`. A rank
    reads the bytes that it owns, of a parameter that is cut over ranks the rows around its part; frozen parameters,
    buffers and plain models whole. Floating values are converted to the model's dtypes. Of tied weights one name is
    enough.

    Args:
        model: the model.
        path: a `.safetensors` file, or a folder as Hugging Face's `save_pretrained` leaves it.
        strict: the files must have all parameters and persistent buffers of the model, and no others.

    Raises:
        InputError: `path` is no path.
        CheckpointError: naming every tensor that is missing, unexpected or of another shape, or a file that is missing
            or damaged, on every rank where one of them finds it; nothing was changed then. Or a file could not be read
            to its end: an engine refuses to use its parameters after that, until a load has succeeded.
    """
    try:
        place = Path(os.fspath(path))
    except TypeError:
        raise InputError(
            f"load_pretrained: path is {path!r}", hint="pass a file or a folder: a str or an os.PathLike"
        ) from None
    assign(model, lambda: find_tensors(place), where=str(place), strict=strict)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor in memory as a source."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source`."""
        return tuple(self.tensor.shape)

    def read(self, start: int, stop: int) -> Tensor:
        """See `Source`."""
        return self.tensor.detach().reshape(-1)[start:stop]


def assign(
    model: nn.Module,
    find: Callable[[], Mapping[str, Source]],
    *,
    where: str,
    strict: bool,
    access: ParamAccess | None = None,
) -> None:
    """Sets parameters and persistent buffers by name; every rank must call where an engine has the model.

    Enters two all-reduces of two numbers, and one all-gather a unit at stages 1 and 2, where an engine has the model.

    Args:
        model: the model.
        find: function that returns the values by name.
        where: origin of the values, for messages.
        strict: whether the source must have all parameters and persistent buffers, and no others, as for
            `load_pretrained`; with pipeline stages each rank looks for those of its own, and knows the others by name.
        access: access of the engine that has the model; None: that of its parameters, if they have one.

    Raises:
        CheckpointError: as for `load_pretrained`.
    """
    params = [(param, _with_stored_name(param, names)) for param, names in _parameter_names(model)]
    buffers = list(_buffer_places(model).values())
    shapes = [(names, _whole_shape(param)) for param, names in params]
    shapes += [(list(places), tuple(buffer.shape)) for buffer, places in buffers]
    homes = [home for param, _ in params if isinstance(home := home_of(param), UnitHome)]
    access = homes[0].access if access is None and homes else access
    names_of = {id(home): names for param, names in params if isinstance(home := home_of(param), UnitHome)}

    def look() -> Mapping[str, Source]:
        sources = find()
        elsewhere = () if access is None else access.elsewhere
        _check_fit(shapes, sources, where=where, strict=strict, elsewhere=elsewhere)
        for home in homes:
            if _first(names_of[id(home)], sources) is not None:
                home.access.check_closed(home, where)
        return sources

    def work(sources: Mapping[str, Source]) -> None:
        for number, (param, names) in enumerate(params):
            name = _first(names, sources)
            if name is not None:
                _set(param, sources[name], number=number)
        for buffer, places in buffers:
            name = _first(list(places), sources)
            if name is not None:
                _set_buffer(buffer, places, sources[name])

    if access is None:
        work(look())
        return
    together = partial(all_or_none, collectives=access.loading, device=access.device, label="load", where=where)
    sources = together(look)
    with access.torn.replacing(WEIGHTS, where=where, whole=strict):
        together(partial(work, sources))
        changed = [home.unit for home in homes if home.unit is not None and _first(names_of[id(home)], sources)]
        access.pieces.spread(list({unit.index: unit for unit in changed}.values()))


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns each buffer that a state dict holds once, by its first name there."""
    return {next(iter(places)): buffer for buffer, places in _buffer_places(model).values()}


def _buffer_places(model: nn.Module) -> dict[int, tuple[Tensor, dict[str, nn.Module]]]:
    """Returns, by its id, each buffer that a state dict holds, with all its names there and their modules."""
    found: dict[int, tuple[Tensor, dict[str, nn.Module]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        transient: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in transient:
                found.setdefault(id(buffer), (buffer, {}))[1][f"{prefix}.{name}" if prefix else name] = module
    return found


def _parameter_names(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Returns each parameter once, with all its names."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), (param, []))[1].append(name)
    return list(found.values())


def _with_stored_name(param: nn.Parameter, names: list[str]) -> list[str]:
    """Returns the names of a parameter, with that of its first use where other pipeline stages use it."""
    home = home_of(param)
    stored = home.extent.name if isinstance(home, UnitHome) and home.extent is not None else None
    return names if stored is None or stored in names else [*names, stored]


def _whole_shape(param: nn.Parameter) -> tuple[int, ...]:
    """Returns the shape of a parameter as sources have it, of which this rank may have a part."""
    home = home_of(param)
    extent = home.extent if isinstance(home, UnitHome) else None
    return tuple(param.shape) if extent is None else extent.whole.shape


def _first(names: list[str], sources: Mapping[str, Source]) -> str | None:
    return next((name for name in names if name in sources), None)


def _check_fit(
    tensors: list[tuple[list[str], tuple[int, ...]]],
    sources: Mapping[str, Source],
    *,
    where: str,
    strict: bool,
    elsewhere: Collection[str],
) -> None:
    problems: list[Problem] = []
    for names, shape in tensors:
        name = _first(names, sources)
        if name is None:
            if strict:
                problems.append(Problem(f"{where}: no `{names[0]}`, which the model has"))
        elif sources[name].shape != shape:
            problems.append(Problem(f"{where}: `{name}` has shape {sources[name].shape}; the model's has {shape}"))
    if strict:
        known = {*elsewhere, *(name for names, _ in tensors for name in names)}
        problems += [Problem(f"{where}: `{name}` is not in the model") for name in sources if name not in known]
    if problems:
        hint = "these are the weights of another model; strict=False takes what fits by name"
        raise CheckpointError.of([Problem(problems[0].message, hint), *problems[1:]])


def _set(param: nn.Parameter, source: Source, *, number: int) -> None:
    home = home_of(param)
    if isinstance(home, UnitHome) and home.extent is not None:
        boxes = home.extent.whole
        home.access.pieces.set_piece(home, partial(read_part, source.read, boxes) if boxes.is_cut else source.read)
    elif isinstance(home, UnbuiltOwner):
        home.own_piece().copy_(source.read(*home.own_range))
    elif param.is_meta:
        assert isinstance(source, StoredTensor), "only files keep values until they are wanted"
        unsettle(param)
        settle(param, StoredHome(param, source, number=number), sharded=False)
    else:
        if isinstance(home, UnitHome):
            home.access.pieces.before_change()
        param.detach().copy_(source.read(0, param.numel()).view(param.shape))


def _set_buffer(buffer: Tensor, places: Mapping[str, nn.Module], source: Source) -> None:
    values = source.read(0, buffer.numel()).view(buffer.shape)
    if not buffer.is_meta:
        buffer.detach().copy_(values)
        return
    real = values.to(buffer.dtype)
    for name, module in places.items():
        module.register_buffer(name.rpartition(".")[2], real)
