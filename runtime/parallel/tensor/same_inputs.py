"""Whether ranks that share each layer were given the same inputs, looked at in the first forward.

With other inputs each rank would add its part of another product, and nothing would fail: the loss would fall, slowly.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from xxhash import xxh3_64

from dsrun.errors import ModelError

from ...mesh.agree.texts import gather_texts
from ...mesh.collectives import Collectives
from ...own_hooks import OwnHook

_LABEL = "inputs of the first forward"
#: What mends other inputs.
HINT = (
    "the loader of initialize gives ranks that share a layer the same samples; a sampler of the script's own takes "
    "num_replicas=engine.dp_world_size and rank=engine.get_data_parallel_rank()"
)


def check_inputs_once(
    model: nn.Module, axis: Collectives, *, ranks: Sequence[int], device: torch.device
) -> RemovableHandle:
    """Has the first forward of a model look at its arguments, see `check_inputs`; later ones cost nothing.

    Args:
        model: the model, of which every rank of the axis runs the same forwards.
        axis: ranks that share each layer.
        ranks: numbers in the job of the axis' ranks.
        device: device of the collectives' tensors.

    Returns:
        handle that takes the look away, where it has not been yet.
    """

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        check_inputs(_by_name(module, args, kwargs), axis, ranks=ranks, device=device)

    handle = model.register_forward_pre_hook(OwnHook(look), with_kwargs=True, prepend=True)
    return handle


def check_inputs(inputs: Mapping[str, Any], axis: Collectives, *, ranks: Sequence[int], device: torch.device) -> None:
    """Raises on every rank where tensors or numbers among the inputs differ; one all-gather of 8 bytes a rank.

    Where they do, each rank tells the others its digests.

    Args:
        inputs: arguments by name; tensors and numbers are looked for in lists, tuples, mappings and dataclasses too.
        axis: ranks that are to have the same.
        ranks: numbers in the job of the axis' ranks.
        device: device of the collectives' tensors.

    Raises:
        ModelError: naming each argument that differs, and ranks with other values than the first.
    """
    if axis.size == 1:
        return
    with torch.no_grad():
        digests = {name: _digest(value) for name, value in inputs_in(inputs)}
    text = json.dumps(digests, sort_keys=True)
    everyone = torch.empty(8 * axis.size, dtype=torch.uint8, device=device)
    own = torch.frombuffer(bytearray(xxh3_64(text.encode()).digest()), dtype=torch.uint8)
    axis.all_gather(everyone, own.to(device), label=_LABEL).wait()
    with axis.reading(_LABEL):
        rows = everyone.view(axis.size, 8).tolist()
    if all(row == rows[0] for row in rows):
        return
    first, *others = [json.loads(one) for one in gather_texts(text, axis, device=device, label=_LABEL)]
    names = sorted({name for of_rank in (first, *others) for name in of_rank})
    odd = {
        name: [rank for rank, digest in zip(ranks[1:], others, strict=True) if digest.get(name) != first.get(name)]
        for name in names
    }
    found = [f"`{name}` on rank {', '.join(map(str, by))}" for name, by in odd.items() if by]
    raise ModelError(
        f"model: ranks {', '.join(map(str, ranks))} share each layer, and were not given the same inputs as rank "
        f"{ranks[0]}: {'; '.join(found)}",
        hint=HINT,
    )


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a forward by the names that its parameters have."""
    try:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no forward that python knows, or other arguments, of which it will complain
        given = {f"argument {number}": value for number, value in enumerate(args, start=1)} | dict(kwargs)
    return dict(given)


def inputs_in(inputs: Any, name: str = "") -> Iterator[tuple[str, Tensor | float | None]]:
    """Yields the tensors, numbers, flags and Nones in arguments, with the names by which they are reached.

    Texts may be a rank's own, and so may what other objects hold: a cache of keys has this rank's heads.
    """
    if inputs is None or isinstance(inputs, Tensor | bool | int | float):
        yield name, inputs
    elif isinstance(inputs, Mapping):
        for key, value in cast("Mapping[Any, Any]", inputs).items():
            yield from inputs_in(value, f"{name}[{key!r}]" if name else str(key))
    elif isinstance(inputs, list | tuple):
        for place, value in enumerate(cast("Sequence[Any]", inputs)):
            yield from inputs_in(value, f"{name}[{place}]")
    elif dataclasses.is_dataclass(inputs) and not isinstance(inputs, type):
        for field in dataclasses.fields(inputs):
            yield from inputs_in(getattr(inputs, field.name, None), f"{name}.{field.name}")


def _digest(value: Tensor | float | None) -> str:
    """Returns a digest of dtype, shape and values; of values that do not lie one by one, of the others alone."""
    if not isinstance(value, Tensor):
        return repr(value)
    tensor = value
    digest = xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized:
        values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()
