"""Schema of `activation_checkpointing`: what forward keeps for backward, and what it does instead."""

from typing import Annotated, ClassVar, Literal

from dsrun.config.knob import Section, knob
from dsrun.config.values import Flag, Fraction, Names, Positive

Policy = Literal[
    "none", "every_block", "interval", "ratio", "sqrt", "hierarchical", "selective", "memory_budget", "compiler"
]


class ActivationCheckpointing(Section):
    """Recompute activations in backward in place of keeping them. One key is enough: the model is not changed.

    DeepSpeed's keys alone switch `policy` to `every_block`, unless the script has called
    `dsrun.checkpointing.configure`: then it chooses the calls itself.
    """

    renamed: ClassVar = {"partitioned_activations": "partition_activations"}

    policy: Annotated[
        Policy | None,
        knob(
            "Which blocks are recomputed. Unset: every block where another key of this section asks for something, "
            "else none.",
            effect="every_block: keeps the input of each block, for a third more compute",
        ),
    ] = None
    blocks: Annotated[
        Names,
        knob("Names of the modules that are blocks, with * and ?. Empty: the repeated stacks that ZeRO cuts along."),
    ] = ()
    interval: Annotated[
        Positive | None, knob("Blocks that are recomputed together, for policy `interval`.", unit="blocks")
    ] = None
    ratio: Annotated[
        Fraction | None, knob("Share of the blocks that are recomputed, for policy `ratio`.", unit="fraction")
    ] = None
    memory_budget: Annotated[
        Positive | None,
        knob(
            "What a rank's activations in blocks may take, for policy `memory_budget`: two micro steps are measured, "
            "then the fastest way is taken.",
            unit="bytes",
        ),
    ] = None
    keep_operations: Annotated[
        Names,
        knob("Operations of torch.ops.aten whose results policy `selective` keeps. Empty: matrix products, attention."),
    ] = ()
    compiler_budget: Annotated[
        Fraction,
        knob(
            "For policy `compiler`: share of activations that torch.compile may keep, of compiled blocks.",
            unit="fraction",
        ),
    ] = 0.5
    partition_activations: Annotated[
        Flag,
        knob("Cut kept activations over the tensor-parallel ranks.", users=(1, 1)),
    ] = False
    cpu_checkpointing: Annotated[
        Flag,
        knob(
            "Move kept activations to the CPU.",
            effect="inputs of two or three blocks stay on the device; costs PCIe traffic that a wide model hides",
            users=(1, 1),
        ),
    ] = False
    nvme_path: Annotated[
        Names,
        knob(
            "Folder on a local NVMe drive, to which what `cpu_checkpointing` moves goes on; a list of folders is "
            "striped over. Each rank has a file there without a name, which is gone with the rank.",
            effect="host memory holds `nvme_buffer_count` inputs, whatever the depth; the disk is written and read "
            "once a micro step, as the section `aio` says",
        ),
    ] = ()
    nvme_buffer_count: Annotated[
        Positive,
        knob(
            "Inputs that host memory has room for on their way to and from `nvme_path`, at least 3; more read further "
            "ahead.",
            unit="inputs",
        ),
    ] = 4
    packing: Annotated[
        Literal["none", "int8"],
        knob(
            "Keep activations in 8 bits, with a scale for each 128 elements.",
            effect="a quarter of fp32, half of bf16; recomputation starts from rounded inputs: results differ",
        ),
    ] = "none"
    contiguous_memory_optimization: Annotated[
        Flag, knob("Keep activations in one buffer; needs `number_checkpoints`.", users=(1, 1))
    ] = False
    number_checkpoints: Annotated[
        Positive | None,
        knob(
            "Inputs that are kept: without a policy, blocks are recomputed in so many segments. Room in the buffer of "
            "`contiguous_memory_optimization`.",
            unit="inputs",
        ),
    ] = None
    preserve_rng_state: Annotated[
        Flag, knob("Draw the same random numbers again (dropout). Off saves microseconds a block.")
    ] = True
    synchronize_checkpoint_boundary: Annotated[
        Flag, knob("Wait for the GPU before and after every block.", users=(1, 1))
    ] = False
    profile: Annotated[
        Flag, knob("Print bytes and seconds of every block once, after three micro steps.", users=(1, 1))
    ] = False

    @property
    def chosen_policy(self) -> Policy:
        """The policy, where it is unset too."""
        if self.policy is not None:
            return self.policy
        asks = (
            self.partition_activations
            or self.cpu_checkpointing
            or self.packing != "none"
            or self.contiguous_memory_optimization
            or self.number_checkpoints is not None
            or self.profile
        )
        return "every_block" if asks else "none"
