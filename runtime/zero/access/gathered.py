"""`GatheredParameters`: parameters whole for a while. Who makes them whole is their keeper's business."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from types import TracebackType

from torch import Tensor, nn

from dsrun.errors import ModelError

from ..partition_parameters import OF_AN_ENGINE, OwnerGroup, ParameterOwner, home_of


class GatheredParameters:
    """A context in which parameters have their whole values; every rank must enter it with the same parameters.

    At stages 0 to 2 parameters are whole anyway: reading them costs nothing, and new values reach the optimizer's fp32
    masters too. If a rank raises inside, nothing is taken over on any rank. May be nested, also over one parameter.
    Of a parameter that is cut over ranks each rank has its part, as in DeepSpeed: the context makes that whole, `shape`
    is the part's, and no other part is brought here; `engine.module_state_dict` gives whole ones.

    Args:
        params: one parameter, or an iterable of parameters; those that nobody has taken over are left alone.
        modifier_rank: number, among the ranks that have the same elements of a parameter, of the one that gives the
            others the new values at the end: of a parameter that is cut, one for each part, which all write. None:
            values are only read.
        fwd_module: DeepSpeed's argument, without use here: parameters keep their addresses.
        enabled: False: nothing happens.

    Raises:
        ModelError: at entry: inside a forward or a backward, or `modifier_rank` is no rank, or another one for some
            parameters than for others; at exit: a parameter was given another shape, or only some of its parts new
            values.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        del fwd_module
        given = [params] if isinstance(params, Tensor) else list(params)
        homes = {id(param): home_of(param) for param in given} if enabled else {}
        self._by_keeper: dict[int, tuple[OwnerGroup, list[ParameterOwner]]] = {}
        for home in homes.values():
            if home is not None:
                self._by_keeper.setdefault(id(home.keeper), (home.keeper, []))[1].append(home)
        for _, found in self._by_keeper.values():
            found.sort(key=_number)  # a set of parameters has another order on every rank
        self._source = modifier_rank

    def __enter__(self) -> None:
        for keeper, homes in self._by_keeper.values():
            if self._source is not None:
                keeper.check_modifier(homes, self._source)
        for keeper, homes in self._by_keeper.values():
            keeper.open(homes, writes=self._source is not None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for keeper, homes in reversed(self._by_keeper.values()):
            keeper.close(homes, source=self._source, failed=error is not None)


def _number(home: ParameterOwner) -> int:
    return home.number


@contextmanager
def unwrap_model_for_generation(model: object) -> Generator[nn.Module]:
    """Yields a module with whole parameters, to generate with; every rank must enter.

    Forwards without a gradient read what is gathered here and enter no collective, so each rank generates as long as
    it wants to.

    Args:
        model: an engine, or a module.

    Raises:
        ModelError: it is neither; or inside a forward or a backward.
    """
    module = getattr(model, "module", None) if hasattr(type(model), OF_AN_ENGINE) else model
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"unwrap_model_for_generation: got a {type(model).__name__}", hint="pass an engine or a torch.nn.Module"
        )
    with GatheredParameters(module.parameters()):
        yield module
