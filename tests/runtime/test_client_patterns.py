"""What libraries and scripts around DeepSpeed write about parameters and engines, word for word, but for the import.

Each pattern is a function that every rank runs and that says whether the outcome is right. The copies that end in
`maybe_zero_3` are in zero/access/test_gathered.py, `zero.Init` in zero/creation/test_construct.py.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun as deepspeed
from dsrun.runtime.zero.partition_parameters import ZeroParamStatus
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

Pattern = Callable[[int], bool]
PATTERNS: dict[str, Pattern] = {}


def pattern(body: Pattern) -> Pattern:
    PATTERNS[body.__name__] = body
    return body


def gpt(seed: int = 7) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT()


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


# transformers ---------------------------------------------------------------------------------------------------------


@pattern
def transformers_loads_a_state_dict_into_a_sharded_model(stage: int) -> bool:
    """`_load_state_dict_into_zero3_model`: gathered for rank 0 to write, module by module."""
    settings = config(stage, micro=2)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = TinyGPT()
    state_dict = gpt(seed=3).state_dict()

    def load(module: nn.Module, state_dict: dict[str, Any], prefix: str = "") -> None:
        args = (state_dict, prefix, {}, True, [], [], [])
        named_parameters = dict(module.named_parameters(prefix=prefix[:-1], recurse=False))
        params_to_gather = [named_parameters[k] for k in state_dict if k in named_parameters]
        if len(params_to_gather) > 0:
            with deepspeed.zero.GatheredParameters(params_to_gather, modifier_rank=0):
                if torch.distributed.get_rank() == 0:
                    module._load_from_state_dict(*args)
        for name, child in module._modules.items():
            if child is not None:
                load(child, state_dict, prefix + name + ".")

    load(model, state_dict)
    engine = deepspeed.initialize(model=model, config_params=settings)[0]
    return equal(full_parameters(engine), {name: param.detach() for name, param in gpt(seed=3).named_parameters()})


@pattern
def transformers_resizes_embeddings(stage: int) -> bool:
    settings = config(stage, micro=2)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = gpt()
    old_embeddings = model.embed
    with deepspeed.zero.GatheredParameters(old_embeddings.weight, modifier_rank=None):
        old_num_tokens, old_embedding_dim = old_embeddings.weight.size()
    with deepspeed.zero.Init(config_dict_or_path=settings):
        new_embeddings = nn.Embedding(old_num_tokens + 3, old_embedding_dim)
    n = old_num_tokens
    with deepspeed.zero.GatheredParameters([old_embeddings.weight, new_embeddings.weight], modifier_rank=0):
        new_embeddings.weight.data[:n, :] = old_embeddings.weight.data[:n, :]
        new_embeddings.weight.data[n:, :] = 0.5
    model.embed = new_embeddings
    engine = deepspeed.initialize(model=model, config_params=settings)[0]
    whole = full_parameters(engine)["embed.weight"]
    return torch.equal(whole[:n], gpt().embed.weight.detach()) and bool((whole[n:] == 0.5).all())


@pattern
def transformers_registers_the_parts_of_a_weight_norm(stage: int) -> bool:
    """As in wav2vec2's positional convolution."""

    class Positional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv: Any = nn.Conv1d(8, 8, 3, padding=1)
            with deepspeed.zero.GatheredParameters(self.conv.weight, modifier_rank=0):
                self.conv = nn.utils.parametrizations.weight_norm(self.conv, name="weight", dim=2)
            weight_g = self.conv.parametrizations.weight.original0
            weight_v = self.conv.parametrizations.weight.original1
            deepspeed.zero.register_external_parameter(self, weight_v)
            deepspeed.zero.register_external_parameter(self, weight_g)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)

    settings = config(stage, micro=2)
    torch.manual_seed(1)
    plain = Positional()
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = Positional()
    engine = deepspeed.initialize(model=model, config_params=settings)[0]
    x = torch.ones(2, 8, 5)
    found = engine(x)
    engine.backward(found.square().mean())
    engine.step()
    return torch.equal(found, plain(x))


# peft -----------------------------------------------------------------------------------------------------------------


@contextmanager
def gather_params_ctx(param: Any, modifier_rank: int | None = 0, fwd_module: nn.Module | None = None) -> Any:
    with deepspeed.zero.GatheredParameters(param, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield


@pattern
def peft_counts_parameters_and_asks_for_shapes(stage: int) -> bool:
    engine = make_engine(config(stage, micro=2), model=gpt())
    all_param = 0
    for _, param in engine.module.named_parameters():
        num_params = param.numel()
        if num_params == 0 and hasattr(param, "ds_numel"):
            num_params = param.ds_numel
        all_param += num_params
    weight: Any = engine.module.head.weight
    out_features, in_features = weight.ds_shape if hasattr(weight, "ds_shape") else weight.shape
    return all_param == sum(p.numel() for p in gpt().parameters()) and (out_features, in_features) == (61, 72)


@pattern
def peft_merges_an_adapter_into_its_base(stage: int) -> bool:
    engine = make_engine(config(stage, micro=2), model=gpt())
    base: Any = engine.module.head
    delta = torch.full((61, 72), 0.25)
    with gather_params_ctx(base.weight):
        base.weight.data += delta
    with gather_params_ctx(base.parameters(), modifier_rank=None, fwd_module=base):
        return torch.equal(base.weight, gpt().head.weight + delta)


# trl ------------------------------------------------------------------------------------------------------------------


@pattern
def trl_mixes_the_reference_model(stage: int) -> bool:
    """`SyncRefModelCallback`: two engines' parameters gathered at once."""
    engine = make_engine(config(stage, micro=2), model=gpt())
    reference = make_engine(config(stage, micro=2), model=gpt(seed=3))
    model, ref_model, alpha = engine.module, reference.module, 0.5

    def sync_target_model(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        for target_param, copy_param in zip(target_model.parameters(), model.parameters(), strict=True):
            target_param.data.mul_(1.0 - alpha).add_(copy_param.data, alpha=alpha)

    with deepspeed.zero.GatheredParameters(list(model.parameters()) + list(ref_model.parameters()), modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            sync_target_model(model, ref_model, alpha)
    expected = {
        name: param.detach().mul(0.5).add(other.detach(), alpha=0.5)
        for (name, param), other in zip(gpt(seed=3).named_parameters(), gpt().parameters(), strict=True)
    }
    return equal(full_parameters(reference), expected)


@pattern
def trl_sends_weights_to_an_inference_server(stage: int) -> bool:
    engine = make_engine(config(stage, micro=2), model=gpt())
    gather_if_zero3 = deepspeed.zero.GatheredParameters if stage == 3 else lambda _: nullcontext()
    sent: dict[str, Tensor] = {}
    for name, param in engine.module.named_parameters():
        with gather_if_zero3([param]):
            if engine.global_rank == 0:
                sent[name] = param.data
    return engine.global_rank != 0 or equal(sent, {name: param.detach() for name, param in gpt().named_parameters()})


@pattern
def trl_generates_with_an_unwrapped_model(stage: int) -> bool:
    engine = make_engine(config(stage, micro=2), model=gpt())
    tokens, _ = batches(0, samples=2)
    with deepspeed.zero.unwrap_model_for_generation(engine) as unwrapped, torch.no_grad():
        return torch.equal(unwrapped(tokens), gpt()(tokens))


# accelerate -----------------------------------------------------------------------------------------------------------


class DeepSpeedEngineWrapper:
    """accelerate's, which steps only where gradients are synchronised."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float:
        grad_norm = self.engine.get_global_grad_norm()
        if hasattr(grad_norm, "item"):
            return grad_norm.item()
        return grad_norm


@pattern
def accelerate_wraps_the_engine(stage: int) -> bool:
    """Its micro steps are those of a script that calls `step` after each backward."""
    settings = config(stage, micro=1, accumulation=2)
    engine, optimizer, _, _ = deepspeed.initialize(model=gpt(), config_params=settings)
    assert hasattr(optimizer, "overflow")
    wrapper = DeepSpeedEngineWrapper(engine)
    size, rank = engine.world_size, engine.global_rank
    for step in range(2):
        inputs, targets = batches(step, samples=2 * size)
        for micro in range(2):
            share = slice(micro * size + rank, micro * size + rank + 1)
            wrapper.backward(loss_of(engine(inputs[share]), targets[share]), sync_gradients=micro == 1)
    found, norm = full_parameters(engine), wrapper.get_global_grad_norm()
    step_was_skipped: bool = optimizer.overflow  # type: ignore[union-attr]
    reference = make_engine(settings, model=gpt())
    train(reference, range(2), samples=2 * size)
    same = equal(found, full_parameters(reference)) and norm == reference.get_global_grad_norm()
    return same and engine.global_steps == 2 and not step_was_skipped


@pattern
def accelerate_gets_a_state_dict(stage: int) -> bool:
    model = make_engine(config(stage, micro=2), model=gpt())
    state_dict: dict[str, Tensor] | None = None
    if model.config["zero_optimization"]["stage"] == 3:
        if model.zero_gather_16bit_weights_on_model_save():
            state_dict = model._zero3_consolidated_16bit_state_dict()
    else:
        state_dict = {name: value.clone() for name, value in model.module.state_dict().items()}
    if stage == 3 and model.global_rank != 0:
        return state_dict is None
    return state_dict is not None and equal(state_dict, dict(gpt().state_dict()))


@pattern
def accelerate_joins_with_its_own_arguments(stage: int) -> bool:
    from dsrun import comm

    comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, timeout=timedelta(seconds=90))
    return comm.is_initialized() and comm.get_world_size() == 2 and comm.get_local_rank() == comm.get_rank()


# OpenRLHF and DeepSpeed-Chat ------------------------------------------------------------------------------------------


def _z3_params_to_fetch(param_list: list[Any]) -> list[Any]:
    return [p for p in param_list if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


@pattern
def openrlhf_initialises_with_arguments_in_a_dict(stage: int) -> bool:
    engine, optim, _, scheduler = deepspeed.initialize(
        model=gpt(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        lr_scheduler=None,
        config=config(stage, micro=2),
        args={"local_rank": 0},
        dist_init_required=True,
    )
    return isinstance(engine, deepspeed.DeepSpeedEngine) and engine.optimizer is optim and scheduler is None


@pattern
def deepspeed_chat_saves_a_sharded_model(stage: int) -> bool:
    engine = make_engine(config(stage, micro=2), model=gpt())
    output_state_dict: dict[str, Tensor] = {}
    for k, v in engine.module.named_parameters():
        if hasattr(v, "ds_id"):
            with deepspeed.zero.GatheredParameters(_z3_params_to_fetch([v]), enabled=stage == 3):
                v_p = v.data.cpu()
        else:
            v_p = v.cpu()
        if engine.global_rank == 0 and "lora" not in k:
            output_state_dict[k] = v_p.detach()
    expected = {name: param.detach() for name, param in gpt().named_parameters()}
    return engine.global_rank != 0 or equal(output_state_dict, expected)


@pattern
def deepspeed_examples_parse_arguments_and_count_tokens(stage: int) -> bool:
    args = Namespace(deepspeed_config=config(stage, micro=2), local_rank=0)
    engine = deepspeed.initialize(args=args, model=gpt(), model_parameters=gpt_parameters(), mpu=None)[0]
    return engine.train_batch_size() == 2 * engine.dp_world_size and engine.get_mom() == [(0.9, 0.999)]


def gpt_parameters() -> None:
    """All of the model's: what scripts pass when they leave the choice to the engine."""


# Each of them, at each stage ------------------------------------------------------------------------------------------


def _run(stage: int) -> dict[str, bool]:
    deepspeed.init_distributed()
    return {name: body(stage) for name, body in PATTERNS.items()}


@pytest.fixture(scope="module", params=[0, 2, 3], ids=lambda stage: f"stage {stage}")
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, bool]]:
    return run_ranks(2, _run, request.param)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_clients_code_works_as_it_is(outcomes: list[dict[str, bool]], name: str) -> None:
    assert [rank[name] for rank in outcomes] == [True, True]
