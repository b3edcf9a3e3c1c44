"""A config with other settings in it: sizes of axes from the command line, and what a search has chosen.

Changes the document as it was written. Whether the result is a good config is asked of `dsrun.config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsrun.errors import UsageError

if TYPE_CHECKING:
    from dsrun.estimate.run.settings import RunSettings

#: Letters of the literature, and what they size.
LETTERS: Mapping[str, str] = {
    "d": "data parallel ranks",
    "t": "tensor parallel ranks",
    "p": "pipeline stages",
    "v": "chunks of layers on each stage",
    "m": "micro batches of an update",
    "u": "ranks that share a sequence by heads (Ulysses)",
    "c": "ranks that share a sequence in a ring",
}
_PART = re.compile(r"([a-z])([1-9][0-9]{0,6})")
_OFFLOADS = ("optimizer", "param")


def parse_axes(text: str) -> dict[str, int]:
    """Reads `t8p16v8m32` as sizes by letter.

    Raises:
        UsageError: it is something else, with what the letters mean.
    """
    words = "; ".join(f"{letter} {meaning}" for letter, meaning in LETTERS.items())
    parts = _PART.findall(text.lower())
    unknown = [letter for letter, _ in parts if letter not in LETTERS]
    twice = [letter for letter, _ in parts if [one for one, _ in parts].count(letter) > 1]
    if not parts or "".join(letter + size for letter, size in parts) != text.lower() or unknown:
        wrong = f", and `{unknown[0]}` is no axis" if unknown else ""
        raise UsageError(f"`--axes` is `{text}`; expected letters with sizes, as `t8p4`{wrong}", hint=words)
    if twice:
        raise UsageError(f"`--axes` is `{text}`, which sizes `{twice[0]}` twice", hint="give each letter once")
    return {letter: int(size) for letter, size in parts}


def with_axes(raw: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns a config with sizes of axes in place of its own; `d` and `c` are no keys of a config.

    Args:
        raw: the config as it was written.
        sizes: sizes by letter, as `parse_axes` gives them.

    Raises:
        UsageError: there are chunks without stages.
    """
    document = dict(raw)
    if "t" in sizes:
        section = {key: value for key, value in _section(raw, "tensor_parallel").items() if key != "tp"}
        slices = {} if "tensor_parallel" in raw or sizes["t"] == 1 else {"sequence_parallel": True}
        document["tensor_parallel"] = {**slices, **section, "autotp_size": sizes["t"]}
    if "p" in sizes or "v" in sizes:
        section = _section(raw, "pipeline")
        stages = sizes.get("p", section.get("stages", 1))
        if stages == 1 and sizes.get("v", 1) > 1:
            raise UsageError(f"`--axes` has v{sizes['v']} chunks and one pipeline stage", hint="add p4, say")
        if "v" in sizes:
            section = {key: value for key, value in section.items() if key not in ("schedule", "virtual_stages")}
            section |= {"virtual_stages": sizes["v"]} if sizes["v"] > 1 else {}
        document["pipeline"] = {**section, "stages": stages}
        if stages == 1:
            document.pop("pipeline")
    if "u" in sizes:
        document["sequence_parallel_size"] = sizes["u"]
    if "m" in sizes:
        document["gradient_accumulation_steps"] = sizes["m"]
    if "train_micro_batch_size_per_gpu" in raw and "gradient_accumulation_steps" in document:
        document.pop("train_batch_size", None)  # of other numbers of data ranks; samples a rank stay
    return document


def with_choice(raw: Mapping[str, Any], chosen: RunSettings, asked: RunSettings) -> dict[str, Any]:
    """Returns a config with what a search has chosen: one section for each axis, stage, offload and batch.

    Args:
        raw: the config as it was written.
        chosen: settings that were chosen.
        asked: settings of the config.
    """
    document = dict(raw)
    document["zero_optimization"] = {**_zero(raw, chosen, asked), "stage": chosen.stage}
    _put(document, "pipeline", _pipeline(_section(raw, "pipeline"), chosen) if chosen.stages > 1 else None)
    _put(document, "tensor_parallel", _tensor(_section(raw, "tensor_parallel"), chosen))
    if (chosen.recompute, chosen.policy) != (asked.recompute, asked.policy):
        # Keys of the policy before go; where kept inputs lie stays.
        kept = ("cpu_checkpointing", "partition_activations", "packing", "nvme_path", "nvme_buffer_count", "profile")
        section = {key: value for key, value in _section(raw, "activation_checkpointing").items() if key in kept}
        policy = {**section, "policy": chosen.policy} if chosen.recompute == "blocks" else None
        _put(document, "activation_checkpointing", policy)
    elif chosen.stages == 1 and _section(raw, "pipeline").get("activation_checkpoint_interval"):
        # The section that has blocks computed again goes.
        document["activation_checkpointing"] = {"policy": "interval", "interval": chosen.interval}
    document["train_micro_batch_size_per_gpu"] = chosen.micro_batch
    document["gradient_accumulation_steps"] = chosen.accumulation_steps
    return document


def format_value(value: int | str | bool) -> str:
    """Returns a value as a config writes it, without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _section(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    return dict(raw.get(name) or {})


def _put(document: dict[str, Any], name: str, section: dict[str, Any] | None) -> None:
    if section:
        document[name] = section
    else:
        document.pop(name, None)


def _zero(raw: Mapping[str, Any], chosen: RunSettings, asked: RunSettings) -> dict[str, Any]:
    section = _section(raw, "zero_optimization")
    for name in _OFFLOADS:
        tier = getattr(chosen, f"offload_{name}")
        if tier == getattr(asked, f"offload_{name}"):
            continue
        if tier == "none":
            section.pop(f"offload_{name}", None)
        else:
            section[f"offload_{name}"] = {**_section(section, f"offload_{name}"), "device": tier}
    return section


def _pipeline(section: dict[str, Any], chosen: RunSettings) -> dict[str, Any]:
    for name in ("stages", "schedule", "virtual_stages", "partition"):
        section.pop(name, None)
    is_chunked = chosen.chunks_per_rank > 1 and chosen.schedule != "zbv"
    chunks = {"virtual_stages": chosen.chunks_per_rank} if is_chunked else {}
    partition = {} if chosen.partition == "cost" else {"partition": chosen.partition}
    return {"stages": chosen.stages, "schedule": chosen.schedule, **chunks, **partition, **section}


def _tensor(section: dict[str, Any], chosen: RunSettings) -> dict[str, Any] | None:
    if chosen.tensor_parallel == 1:
        return None
    section = {key: value for key, value in section.items() if key not in ("tp", "autotp_size", "sequence_parallel")}
    slices = {"sequence_parallel": True} if chosen.sequence_slices else {}
    return {"autotp_size": chosen.tensor_parallel, **slices, **section}
