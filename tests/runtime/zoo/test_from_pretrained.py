"""transformers' `from_pretrained` at stage 3, where it builds in slices and where it does not: the files' values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsrun
from dsrun.as_deepspeed.search_path import install
from dsrun.errors import ModelError
from support.ranks import run_ranks
from support.training import config, full_parameters

pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")
pytest.importorskip("accelerate", reason="accelerate is not installed; pip install -e '.[test-clients]'")

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}


def save_tied(folder: Path) -> None:
    """Head and embedding are one parameter, in several files with an index."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32))
    model.save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").is_file()


def save_as_torch_does(folder: Path) -> None:
    """A file of torch's own format."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def save_without_head(folder: Path) -> None:
    """The class that loads it has a head that the files do not have."""
    from transformers import LlamaConfig, LlamaModel

    LlamaModel(LlamaConfig(**LLAMA, num_labels=3, pad_token_id=0)).save_pretrained(folder)


def save_experts(folder: Path) -> None:
    """Experts lie one by one in the files and in one parameter in the model."""
    from transformers import MixtralConfig, MixtralForCausalLM

    MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4)).save_pretrained(folder)


def save_with_buffers(folder: Path) -> None:
    """Batch norms have statistics, which are no parameters."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    )
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.fill_(0.25)
    model.save_pretrained(folder)


#: Name to (what saves it, the class that loads it).
CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "tied, sharded files": (save_tied, "GPT2LMHeadModel"),
    "torch's format": (save_as_torch_does, "LlamaForCausalLM"),
    "without a head": (save_without_head, "LlamaForSequenceClassification"),
    "experts": (save_experts, "MixtralForCausalLM"),
    "buffers": (save_with_buffers, "ResNetForImageClassification"),
}
Values = dict[str, Tensor]
#: By case and way.
Loaded = dict[tuple[str, str], list[Any]]


def values_of(model: Any) -> Values:
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


WAYS = ("plain", "init", "config", "fresh", "fresh, config")


def _load(root: str) -> Loaded:
    """For each case and way: values of a plain model, those of an engine, and how much a rank held before that.

    The ways are a plain `from_pretrained`, one inside `zero.Init`, and one where transformers has a config of stage 3
    and so builds in slices; then models without files, plain and with that config.
    """
    install()  # before transformers looks for deepspeed
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    info = dsrun.init_distributed()
    settings = config(3, micro=1)
    found: Loaded = {}
    for case, (_, name) in CASES.items():
        cls: Any = getattr(transformers, name)
        folder = Path(root) / name
        model_config = cls.config_class.from_pretrained(folder)
        for way in WAYS:
            make = (
                partial(cls._from_config, model_config)
                if way.startswith("fresh")
                else partial(cls.from_pretrained, folder)
            )
            torch.manual_seed(3)
            plain = drawn_once(make) if way == "fresh, config" else make()
            torch.manual_seed(3 + info.rank)  # what no file has is rank 0's
            hf = HfDeepSpeedConfig(settings) if way.endswith("config") else None
            with dsrun.zero.Init(config_dict_or_path=settings, enabled=way == "init"):
                model = make()
            del hf  # transformers has a weak reference
            same_keys = shapes(model.state_dict()) == shapes(plain.state_dict())
            held = sum(param.untyped_storage().nbytes() // param.itemsize for param in set(model.parameters()))
            engine = dsrun.initialize(model=model, config=settings)[0]
            values = {**full_parameters(engine), **dict(engine.module.named_buffers())}
            found[case, way] = [values_of(plain), values, same_keys, held, sum(p.numel() for p in plain.parameters())]
    return found


def drawn_once(make: Callable[[], Any]) -> Any:
    """As transformers draws what it builds in slices: not in constructors, which it undoes else."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = make()
    model.initialize_weights()
    model.tie_weights()
    return model


def shapes(state: Values) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


def _load_and_use(root: str) -> tuple[Loaded, list[Any]]:
    return _load(root), _use(root)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Loaded, list[Any]]]:
    """What ranks have loaded and used: both in the same ranks, for each imports transformers by itself."""
    root = tmp_path_factory.mktemp("models")
    for save, name in CASES.values():
        torch.manual_seed(1)
        save(root / name)
    return run_ranks(2, _load_and_use, str(root), timeout_s=300)


@pytest.fixture(scope="module")
def ranks(both: list[tuple[Loaded, list[Any]]]) -> list[Loaded]:
    return [loaded for loaded, _ in both]


@pytest.mark.timeout(400)  # the first test makes all engines
@pytest.mark.parametrize("way", WAYS)
def test_a_model_of_transformers_has_its_values_at_stage_3(ranks: list[Loaded], way: str) -> None:
    for rank in ranks:
        for case in CASES:
            plain, values, same_keys, held, whole = rank[case, way]
            assert same_keys, case
            assert values.keys() == plain.keys(), case
            for name, value in plain.items():
                assert torch.equal(values[name], value), f"{case}: {name}"
            if way.endswith("config"):
                assert held < whole / 10, f"{case}: a rank had {held} elements of {whole} before the engine"


def _use(root: str) -> list[Any]:
    """Resizes a model that was built in slices, trains it, generates and saves, all by transformers' functions."""
    install()  # before transformers looks for deepspeed
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    dsrun.init_distributed()
    settings = config(3, micro=2)
    folder = Path(root) / "GPT2LMHeadModel"
    hf = HfDeepSpeedConfig(settings)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    model.resize_token_embeddings(70, mean_resizing=False)
    tied = model.get_input_embeddings().weight is model.lm_head.weight
    engine: Any = dsrun.initialize(model=model, config=settings)[0]
    embedding = full_parameters(engine)["transformer.wte.weight"]
    tokens = torch.arange(3, 19).view(2, 8)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    wanted = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generated = engine.module.generate(tokens, **wanted)
    saved = folder.parent / "saved"
    try:
        engine.module.save_pretrained(saved)
        refused = ""
    except ModelError as error:
        refused = str(error)
    engine.module.save_pretrained(saved, state_dict=engine.module_state_dict(all_ranks=True))
    torch.distributed.barrier()  # one rank has written
    del hf
    again = transformers.GPT2LMHeadModel.from_pretrained(saved)
    return [tied, embedding, generated, refused, torch.equal(again.generate(tokens, **wanted), generated)]


@pytest.mark.timeout(400)
def test_a_model_is_resized_trained_asked_and_saved_by_transformers_functions(
    both: list[tuple[Loaded, list[Any]]],
) -> None:
    (tied, embedding, generated, refused, same), other = (used for _, used in both)
    assert tied
    assert embedding.shape == (70, 32)
    assert bool(embedding.isfinite().all())
    assert torch.equal(embedding, other[1])
    assert generated.shape == (2, 11)
    assert torch.equal(generated, other[2])
    assert "is sharded: at ZeRO stage 3 no rank holds the whole model" in refused
    assert same
