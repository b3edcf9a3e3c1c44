"""Models cut over the threads of a `LoopbackWorld`, beside the same models whole; all in fp64 unless a test says else.

Plans stand here as tables of names, so that tests of the cut do not hang on where a job finds its plan.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dsrun.runtime.layout.cuts import Cuts
from dsrun.runtime.mesh.collectives import Traffic
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.cut import cut_layers, of_first_rank
from dsrun.runtime.parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ROW, Form, ModelPlan, Style

CPU = torch.device("cpu")
VOCAB = 61

#: Styles of modules of transformers' decoders, by the last part of their names; embedding and head apart.
MODULES: Mapping[str, Style] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), COLUMN),
    **dict.fromkeys(("o_proj", "down_proj"), ROW),
    **dict.fromkeys(("q_norm", "k_norm"), Style(Form.PARTIAL_GRADIENT)),
    "experts": Style(Form.EXPERTS),
}
#: The same with embedding and head.
WITH_VOCABULARY: Mapping[str, Style] = {**MODULES, "embed_tokens": Style(Form.VOCABULARY), "lm_head": GATHERED_COLUMN}
#: Styles of the parameters of experts.
PARAMETERS: Mapping[str, Style] = {"gate_up_proj": Style(Form.COLUMN, parts=2), "down_proj": ROW}

_SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 46,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
}


def model_of(family: str, *, experts: str = "eager", **values: Any) -> Any:
    """Returns a tiny model of transformers, in fp64 throughout, with values that no bias or norm is trivial in.

    Args:
        family: beginning of the names of its classes: `Llama` of `LlamaForCausalLM`.
        experts: name that transformers has for how experts are computed; all but `eager` have no fp64.
        values: values of its configuration beside the small sizes.
    """
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **values})
    config._experts_implementation = experts
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double()
    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.__class__ = _with_forward(type(module), _routed)
        if type(module).__name__.endswith("RMSNorm"):
            module.__class__ = _with_forward(type(module), _normed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.02 * torch.randn_like(param))
    return model


@cache
def _with_forward(own: type[nn.Module], forward: Callable[..., Any]) -> type[Any]:
    """Returns a class with another forward, in the dtype of what it is given: transformers' own compute in fp32."""
    return type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__})


def _normed(norm: Any, hidden_states: Tensor) -> Tensor:
    return nn.functional.rms_norm(hidden_states, hidden_states.shape[-1:], norm.weight, norm.variance_epsilon)


def _routed(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = nn.functional.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
    scores, indices = torch.topk(logits.softmax(-1), router.top_k, dim=-1)
    return logits, scores / scores.sum(-1, keepdim=True), indices


def plan_of(model: nn.Module, modules: Mapping[str, Style] = MODULES, **attributes: tuple[str, ...]) -> ModelPlan:
    """Returns a plan by the last parts of names; parameters of experts have their own styles.

    Args:
        model: the model.
        modules: styles by the last part of a module's name.
        attributes: attributes to be divided, by the last part of a module's name.
    """
    inside = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]
    return ModelPlan(
        "the test",
        {name: modules[last] for name, _ in model.named_modules() if (last := name.rpartition(".")[2]) in modules},
        {
            f"{name}.{key}": style
            for name in inside
            for key, style in PARAMETERS.items()
            if key in dict(model.get_submodule(name).named_parameters(recurse=False))
        },
        {
            name: attributes[last]
            for name, _ in model.named_modules()
            if (last := name.rpartition(".")[2]) in attributes
        },
    )


@dataclass(slots=True)
class Compared:
    """One rank's model, cut, as it stands against the whole one.

    Attributes:
        model: the model, cut.
        cuts: changes to its parameters.
        outputs: its outputs, all floating tensors flat in one.
        errors: norm of each difference by the norm of what it should be: of outputs, of gradients by the parameter's
            name, of gradients of inputs by their number.
        same: whether all of them have the whole model's bits.
        forward: traffic of the forward.
        backward: traffic of the backward.
    """

    model: Any
    cuts: Cuts
    outputs: Tensor
    errors: dict[str, float]
    same: bool
    forward: Traffic
    backward: Traffic

    @property
    def worst(self) -> float:
        """The largest error."""
        return max(self.errors.values())


def compare(
    model: nn.Module,
    plan: ModelPlan,
    inputs: tuple[Tensor, ...],
    size: int,
    *,
    call: Callable[..., Any] = lambda model, *inputs: model(*inputs),
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    **options: bool,
) -> list[Compared]:
    """Runs a model whole, and cut over `size` ranks, forward and backward with the same gradient of the outputs.

    Args:
        model: model whose outputs are whole on all ranks; left as it is.
        plan: its plan.
        inputs: arguments of the call; floating ones have gradients.
        size: ranks.
        call: function that calls the model and returns one tensor.
        prepare: function that is given each cut model, and returns the one to call.
        options: options of `cut_layers`.
    """
    whole = copy.deepcopy(model)
    expected = call(whole, *(own := _own(inputs)))
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5)).to(expected)
    expected.backward(cotangent)
    right = {"output": expected.detach(), **_input_grads(own)}
    right.update((name, _grad(param)) for name, param in whole.named_parameters())
    models = [copy.deepcopy(model) for _ in range(size)]

    def body(axis: LoopbackCollectives) -> Compared:
        cuts = cut_over(models[axis.rank], plan, axis, **options)
        mine = prepare(models[axis.rank])
        before = _now(axis)
        given = _own(inputs)
        outputs = call(mine, *given)
        middle = _now(axis)
        outputs.backward(cotangent)
        after = _now(axis)
        found = {"output": outputs.detach(), **_input_grads(given), **whole_grads(models[axis.rank], cuts, axis)}
        assert found.keys() == right.keys()
        return Compared(
            mine,
            cuts,
            outputs.detach(),
            {name: relative(found[name], value) for name, value in right.items()},
            all(torch.equal(found[name], value) for name, value in right.items()),
            middle.since(before),
            after.since(middle),
        )

    return LoopbackWorld(size).run(body)


def cut_over(model: nn.Module, plan: ModelPlan, axis: LoopbackCollectives, **options: bool) -> Cuts:
    """Cuts a model that the ranks of one axis have, and no others; see `cut_layers` for the options."""
    return cut_layers(model, plan, axis, of_first_rank(axis, CPU), device=CPU, **options)


def whole_grads(model: nn.Module, cuts: Cuts, axis: LoopbackCollectives) -> dict[str, Tensor]:
    """Returns the gradients of whole parameters by name: parts put together by their boxes, partial ones summed."""
    return {name: _as_whole(param, _grad(param), cuts, axis) for name, param in model.named_parameters()}


def whole_values(model: nn.Module, cuts: Cuts, axis: LoopbackCollectives) -> dict[str, Tensor]:
    """Returns whole parameters by name: parts put together by their boxes."""
    return {name: _as_whole(param, param.detach(), cuts, axis, sums=False) for name, param in model.named_parameters()}


def relative(found: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference by the norm of what it should be; where that is nothing, itself."""
    assert found.shape == expected.shape
    norm = expected.norm().item()
    return (found - expected).norm().item() / (norm if norm > 1e-10 else 1.0)


def _as_whole(
    param: nn.Parameter, value: Tensor, cuts: Cuts, axis: LoopbackCollectives, *, sums: bool = True
) -> Tensor:
    cut = cuts.get(id(param))
    if cut is None or (cut.whole is None and not sums):
        return value
    if cut.whole is None:
        total = value.clone(memory_format=torch.contiguous_format)
    else:
        assert cut.whole.numel == param.numel()
        total = value.new_zeros(cut.whole.shape)
        position = 0
        for box in cut.whole.boxes:
            total[box.slices] += value.reshape(-1)[position : position + box.numel].view(box.shape)
            position += box.numel
    axis.all_reduce(total.view(-1)).wait()
    return total


def _own(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)


def _input_grads(inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {f"input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}


def _grad(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


def _now(axis: LoopbackCollectives) -> Traffic:
    return Traffic(Counter(axis.traffic.calls), Counter(axis.traffic.bytes))
