"""What a rank shall train in a layout of ranks, and what it shall probe, as values that travel as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from teams.job import JsonJob
from tensor_parts.job import Job as Llama


@dataclass(frozen=True, slots=True)
class Job(JsonJob):
    """A layout of ranks, and the size of what they train.

    Attributes:
        program: module that a rank runs.
        contender: name of who trains.
        data: number of ranks with samples of their own.
        tensor: number of ranks that share each layer.
        pipe: number of pipeline stages.
        stage: ZeRO stage.
        schedule: order of the stages' passes.
        chunks: number of chunks of a stage.
        micros: number of micro batches of an update.
        samples: number of samples of an update, of all ranks.
        seq: number of tokens of a sample.
        hidden: width of the model.
        inner: width inside of a block's MLP.
        layers: number of blocks.
        vocab: number of tokens there are.
    """

    program: ClassVar[str] = "layouts_parts.rank"

    contender: str = "dsrun"
    data: int = 1
    tensor: int = 1
    pipe: int = 1
    stage: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    micros: int = 1
    samples: int = 16
    seq: int = 32
    hidden: int = 512
    inner: int = 1408
    layers: int = 8
    vocab: int = 4096

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor * self.pipe

    @property
    def micro_samples(self) -> int:
        """Number of samples of a micro batch of one rank."""
        samples, rest = divmod(self.samples, self.data * self.micros)
        assert rest == 0, "every rank and micro batch has as many samples"
        return samples

    @property
    def name(self) -> str:
        """Name of the layout in tables."""
        axes = (("d", self.data), ("p", self.pipe), ("t", self.tensor))
        sizes = "".join(f"{axis}{size}" for axis, size in axes if size > 1)
        schedule = f", {self.schedule}" if self.pipe > 1 else ""
        return f"{sizes} stage {self.stage}{schedule}{f' v{self.chunks}' if self.chunks > 1 else ''}"

    @property
    def llama(self) -> Llama:
        """The model."""
        return Llama(
            "plain",
            ranks=1,
            hidden=self.hidden,
            inner=self.inner,
            layers=self.layers,
            vocab=self.vocab,
            samples=self.samples,
            seq=self.seq,
        )

    @property
    def config(self) -> dict[str, Any]:
        """The config. Nothing is clipped, and units of any size are cut and gathered."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_samples,
            "gradient_accumulation_steps": self.micros,
            "gradient_clipping": 0.0,
            "steps_per_print": 1_000_000,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            "tensor_parallel": {"autotp_size": self.tensor},
            "pipeline": {"stages": self.pipe, "schedule": self.schedule, "virtual_stages": self.chunks},
        }


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that all ranks do at once while it is timed.

    Attributes:
        what: name of it: `products`, `update`, or a kind of message (`all_gather`, `all_reduce`, ...).
        size: tokens of a product, elements of an update, or bytes of a buffer.
        ranks: ranks that take part in a collective, or share each layer whose products are made.
    """

    what: str
    size: int
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class ProbeJob(JsonJob):
    """The probes of all layouts.

    Attributes:
        program: module that a rank runs.
        contender: name of who probes.
        ranks: number of ranks.
        probes: fields of each `Probe`.
        model: fields of the `Job` whose model has the products' sizes.
    """

    program: ClassVar[str] = "layouts_parts.probe_rank"

    contender: str = "probe"
    ranks: int = 4
    probes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    model: dict[str, Any] = field(default_factory=dict[str, Any])
