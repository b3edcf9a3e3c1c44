"""What the plan predicts for a layout, with a machine whose speeds are those of the probes. Measures nothing.

[Note: a core to itself] Probes are timed while all ranks do the same, so each has a part of a core. The plan's speeds
are those of a rank that has a core to itself, which is as many times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dsrun.config.load import load
from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.model.units import ModelSize, from_architecture
from dsrun.estimate.prediction import Prediction, predict
from dsrun.estimate.run.machine import Machine, Speeds
from dsrun.estimate.run.settings import RunSettings, read_settings
from dsrun.estimate.time.axes import AxisTraffic
from dsrun.estimate.time.steps import update_bytes

from .job import Job, Probe
from .products import flops_of

_FP32_BYTES = 4


def model_of(job: Job) -> ModelSize:
    """Returns the model as the plan sees it."""
    llama = job.llama
    shape = Architecture(
        layers=llama.layers,
        hidden=llama.hidden,
        intermediate=llama.inner,
        heads=llama.heads,
        kv_heads=llama.key_heads,
        head_dim=llama.hidden // llama.heads,
        vocab=llama.vocab,
    )
    return from_architecture(shape, label="Llama")


def machine_of(job: Job, cores: float) -> Machine:
    """Returns this machine, of whose speeds nothing is known yet.

    Args:
        job: layout, for its ranks.
        cores: cores that the ranks share.
    """
    return Machine(label="here", ranks=job.ranks, ranks_per_host=job.ranks, cores_per_host=cores)


def settings_of(job: Job) -> RunSettings:
    """Returns the settings that the plan reads from the layout's config."""
    return read_settings(load(job.config, world_size=job.ranks), ranks=job.ranks, sequence=job.seq)


def probes_of(job: Job) -> tuple[Probe, ...]:
    """Returns what has to be probed for a layout: all at the sizes that it computes with and moves."""
    machine = machine_of(job, job.ranks)
    traffic = predict(model_of(job), settings_of(job), machine).traffic
    messages = {probe for axis in traffic.axes for probe, _ in _messages(job, axis)}
    return (_products(job), _update(traffic.optimizer_bytes), *sorted(messages, key=str))


def predicted(job: Job, seconds: Mapping[Probe, float], cores: float) -> Prediction:
    """Returns the plan's prediction.

    Args:
        job: layout.
        seconds: seconds of the probes, of a rank while all others did the same.
        cores: cores that the ranks share.
    """
    machine = machine_of(job, cores)
    model, settings = model_of(job), settings_of(job)
    traffic = predict(model, settings, machine).traffic
    products, update = _products(job), _update(traffic.optimizer_bytes)
    moved = [(axis, *pair) for axis in traffic.axes for pair in _messages(job, axis)]
    sent = sum(_sent(axis, probe.what, nbytes) for axis, probe, nbytes in moved)
    moving_s = sum(nbytes / probe.size * seconds[probe] for _, probe, nbytes in moved)
    rates = {
        "flops": flops_of(job, tokens=products.size, tensor=products.ranks) / seconds[products],
        "memory": traffic.optimizer_bytes / seconds[update],
        "peer": sent / moving_s,
    }
    # See [Note: a core to itself].
    given = Speeds(**{name: rate * machine.ranks_per_core for name, rate in rates.items()})
    return predict(model, settings, replace(machine, given=given))


def _products(job: Job) -> Probe:
    return Probe("products", job.micro_samples * job.seq, job.tensor)


def _update(nbytes: int) -> Probe:
    return Probe("update", nbytes // update_bytes(1, RunSettings()))


def _messages(job: Job, axis: AxisTraffic) -> Iterator[tuple[Probe, int]]:
    """Yields the probe of each kind of message, and the bytes of all such buffers of an update.

    Layers' ranks and stages move activations of a micro batch, and data ranks a block.
    """
    activation = job.micro_samples * job.seq * job.hidden
    size = _FP32_BYTES * (_block_numel(job) if axis.name == "data" else activation)
    for kind, nbytes in axis.buffers.items():
        yield Probe(kind, min(size, nbytes), 1 if kind == "send" else axis.ranks), nbytes


def _block_numel(job: Job) -> int:
    shape = model_of(job).architecture
    assert shape is not None, "the model is made of one"
    return shape.block_numel // job.tensor


def _sent(axis: AxisTraffic, kind: str, nbytes: int) -> int:
    return replace(axis, buffers={kind: nbytes}).sent_bytes
