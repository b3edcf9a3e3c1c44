"""DeepSpeed's estimates of memory for parameters, gradients and optimizer states. Of what DeepSpeed keeps, not dsrun.

The numbers are those that DeepSpeed 0.19.8 prints, from a count of parameters alone; scripts compare or print them.
What dsrun itself needs, activations included, `dsrun plan` works out from the model and the config.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ...zero.partition_parameters import is_zero_param

_GIB = 1 << 30
_MILLION = 10**6
#: Bytes of a parameter in 16 bits.
_HALF = 2
#: Bytes of a parameter in fp32.
_FULL = 4
#: Bytes of a parameter with its gradient, in 16 bits and fp32, fp32 master and Adam's two states.
_ALL = 18
#: Those that stay when the 16-bit parameter lies elsewhere.
_STATES = 16
_PLAN = "dsrun keeps other buffers: `dsrun plan MODEL --config FILE` says what it needs, with activations"


class _Row(NamedTuple):
    cpu_bytes: int
    gpu_bytes: int
    options: str


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Estimates what a node's host memory and a GPU hold at stage 2.

    Args:
        total_params: Parameters of the model.
        num_gpus_per_node: GPUs of a node.
        num_nodes: Nodes.
        cpu_offload: Whether optimizer states lie in host memory.
        additional_buffer_factor: Factor on host memory, for buffers.

    Returns:
        bytes of host memory, and bytes of a GPU.
    """
    gpus = num_nodes * num_gpus_per_node
    gpu_bytes = _HALF * total_params
    if cpu_offload:
        cpu_bytes = total_params * max(_FULL * gpus, _STATES) * additional_buffer_factor
    else:
        gpu_bytes += int(_ALL * total_params / gpus)
        cpu_bytes = total_params * _FULL * num_gpus_per_node * additional_buffer_factor
    return int(cpu_bytes), gpu_bytes


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of a model at stage 2.

    Args:
        model: Model.
        num_gpus_per_node: GPUs of a node.
        num_nodes: Nodes.
        additional_buffer_factor: Factor on host memory, for buffers.
    """
    estimate_zero2_model_states_mem_needs_all_cold(
        total_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of a number of parameters at stage 2.

    Args:
        total_params: Parameters of the model.
        num_gpus_per_node: GPUs of a node.
        num_nodes: Nodes.
        additional_buffer_factor: Factor on host memory, for buffers.
    """
    rows = [
        _Row(
            *estimate_zero2_model_states_mem_needs(
                total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
            ),
            f"offload_optimizer={_device(offload)}",
        )
        for offload in (True, False)
    ]
    _print(f"Model with {_millions(total_params)} total params.", rows, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Estimates what a node's host memory and a GPU hold at stage 3.

    Args:
        total_params: Parameters of the model.
        largest_layer_params: Parameters of its largest layer, which is gathered as one.
        num_gpus_per_node: GPUs of a node.
        num_nodes: Nodes.
        cpu_offload: Whether optimizer states lie in host memory.
        cpu_offload_params: Whether parameters do as well.
        zero_init: Whether the model is built in slices, so that no rank holds all of it.
        additional_buffer_factor: Factor on host memory, for buffers.

    Returns:
        bytes of host memory, bytes of a GPU, and those of them that the largest layer takes.
    """
    gpus = num_nodes * num_gpus_per_node
    layer_bytes = _FULL * largest_layer_params
    whole_bytes = _FULL * num_gpus_per_node
    if cpu_offload:
        kept = (_ALL if cpu_offload_params else _STATES) * (1 / num_nodes)
        gpu_bytes = layer_bytes if cpu_offload_params else layer_bytes + int(_HALF * total_params / gpus)
        cpu_bytes = total_params * (kept if zero_init else max(whole_bytes, kept)) * additional_buffer_factor
    else:
        gpu_bytes = layer_bytes + int(_ALL * total_params / gpus)
        cpu_bytes = (largest_layer_params if zero_init else total_params) * whole_bytes * additional_buffer_factor
    return int(cpu_bytes), gpu_bytes, layer_bytes


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of a model at stage 3.

    Args:
        model: Model.
        num_gpus_per_node: GPUs of a node.
        num_nodes: Nodes.
        additional_buffer_factor: Factor on host memory, for buffers.
    """
    estimate_zero3_model_states_mem_needs_all_cold(
        *total_and_largest_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of a number of parameters at stage 3.

    Args:
        total_params: Parameters of the model.
        largest_layer_params: Parameters of its largest layer.
        num_gpus_per_node: GPUs of a node.
        num_nodes: Nodes.
        additional_buffer_factor: Factor on host memory, for buffers.
    """
    rows: list[_Row] = []
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            cpu_bytes, gpu_bytes, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                zero_init,
                additional_buffer_factor,
            )
            options = f"offload_param={_device(params)}, offload_optimizer={_device(optimizer)}"
            rows.append(_Row(cpu_bytes, gpu_bytes, f"{options}, zero_init={int(zero_init)}"))
    model = (
        f"Model with {_millions(total_params)} total params, {_millions(largest_layer_params)} largest layer params."
    )
    _print(model, rows, num_gpus_per_node, num_nodes)


def total_params(model: nn.Module) -> int:
    """Returns the number of a model's parameters; those that share memory count once.

    Args:
        model: Model.
    """
    return sum({_memory(param): param.numel() for param in model.parameters()}.values())


def _memory(param: nn.Parameter) -> int:
    """Returns what tells memory apart: not its address, where there is none or units take turns in it."""
    return id(param) if param.is_meta or is_zero_param(param) else param.data_ptr()


def total_and_largest_params(model: nn.Module) -> tuple[int, int]:
    """Returns the number of a model's parameters, and that of the module with the most parameters of its own.

    Args:
        model: Model.
    """
    own = (sum(param.numel() for param in module.parameters(recurse=False)) for module in model.modules())
    return total_params(model), max(own)


def _device(offloaded: bool) -> str:
    return "cpu " if offloaded else "none"


def _millions(count: int) -> str:
    return f"{int(count / _MILLION)}M"


def _print(model: str, rows: Sequence[_Row], gpus: int, nodes: int) -> None:
    setup = f"{nodes} {'nodes' if nodes > 1 else 'node'}, {gpus} {'GPUs' if gpus > 1 else 'GPU'} per node."
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {setup}\nSW: {model}")
    print("  per CPU  |  per GPU |   Options")
    for row in rows:
        print(f" {row.cpu_bytes / _GIB:7.2f}GB | {row.gpu_bytes / _GIB:6.2f}GB | {row.options}")
    print(_PLAN)
