"""Names of torch that are private, or that moved between 2.10 and 2.15, under one roof. Nothing else is here."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, overrides
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.autograd import Variable
from torch.autograd import profiler as _profiler
from torch.autograd.graph import get_gradient_edge
from torch.nn import attention
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "COMPILER",
    "AttentionChoice",
    "EnclosingCalls",
    "HashStore",
    "OperationObserver",
    "PrefixStore",
    "Store",
    "TCPStore",
    "adds_gradient",
    "all_gather_single",
    "backends_of",
    "backward_number",
    "compiler_is_imported",
    "compiler_memory_budget",
    "enclosing_calls",
    "foreach_mul",
    "foreach_zero",
    "forward_hooks",
    "forward_pre_hooks",
    "function_modes",
    "fused_adam",
    "in_backward",
    "in_transform",
    "is_compiled",
    "keeps_graph",
    "memory_trace",
    "named_arguments",
    "new_named_group",
    "out_of_transforms",
    "pass_for_parameter",
    "profiler_runs",
    "reduce_scatter_single",
    "run_optimizers_uncompiled",
    "set_own_threads",
    "start_memory_history",
    "start_profiler",
    "stop_memory_history",
    "stop_profiler",
    "store_of",
    "timeout_of",
    "unseen_by_dispatch_modes",
    "unseen_by_modes",
    "untransformed",
    "uses_autograd_threads",
    "when_backward_ends",
    "without_overrides",
]


def _newest(*names: str) -> Callable[..., Any]:
    """Returns the first function of torch.distributed that this torch has."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


#: (output, input, group=, async_op=) -> Work. Renamed in torch 2.13; the old name warns there.
all_gather_single = _newest("all_gather_single", "all_gather_into_tensor")
#: (output, input, group=, async_op=) -> Work. Renamed in torch 2.13; the old name warns there.
reduce_scatter_single = _newest("reduce_scatter_single", "reduce_scatter_tensor")


def backends_of(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Returns which backend a group has for which type of device, like {"cpu": "gloo", "cuda": "nccl"}.

    Args:
        group: None: the default group.
    """
    # Up to torch 2.15 the text has every part; a name alone would be no part of any device.
    parts = (part.rpartition(":") for part in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in parts}


def timeout_of(group: dist.ProcessGroup) -> float:
    """Returns how long a collective of a group waits for the other ranks, in seconds."""
    # All parts of a group have one time-out.
    device = torch.device("cpu" if "cpu" in backends_of(group) else "cuda")
    backend: Any = group._get_backend(device)  # pyright: ignore[reportPrivateUsage]
    return backend.options._timeout.total_seconds()


def store_of(group: dist.ProcessGroup) -> Store:
    """Returns the part of the job's store that a group's ranks share."""
    return dist.distributed_c10d._get_process_group_store(group)  # pyright: ignore[reportPrivateUsage]


def new_named_group(ranks: Sequence[int], *, backend: str, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Makes a group of some ranks, of which this is one; these ranks call, and no others.

    `new_group(use_local_synchronization=True)` does the same under a name of torch's own, which is made of the ranks
    and of how many groups the caller has. Ranks that have unlike numbers of groups would wait for each other in vain.

    Args:
        ranks: ranks of the group, by their numbers in the default group, ascending.
        backend: the group's library, for tensors on the CPU.
        name: name under which the group's ranks meet; no other group of the default one has had it.
        timeout: longest wait for the other ranks, in this call and in the group's collectives.
    """
    c10d: Any = dist.distributed_c10d
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup), "torch.distributed is not initialised"
    members = list(ranks)
    group, _ = c10d._new_process_group_helper(
        len(members),
        members.index(world.rank()),
        members,
        c10d.Backend(backend),
        store_of(world),
        name,
        timeout=timeout,
        group_desc=name,
    )
    c10d._world.pg_group_ranks[group] = {member: number for number, member in enumerate(members)}
    return group


def foreach_mul(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiplies tensors in place; on CUDA in a few launches for all of them."""
    if tensors:
        torch._foreach_mul_(tensors, factor)  # pyright: ignore


def foreach_zero(tensors: Sequence[Tensor]) -> None:
    """Fills tensors with zeros; on CUDA in a few launches for all of them."""
    if tensors:
        torch._foreach_zero_(tensors)  # pyright: ignore


def forward_pre_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Returns what a module calls before its forward, in order."""
    return list(module._forward_pre_hooks.values())  # pyright: ignore[reportPrivateUsage]


def forward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Returns what a module calls behind its forward, in order."""
    return list(module._forward_hooks.values())  # pyright: ignore[reportPrivateUsage]


def fused_adam(options: Mapping[str, Any], count: Tensor) -> Callable[[Tensor, Tensor, Sequence[Tensor]], None]:
    """Returns torch's fused kernel of Adam or AdamW for one leaf, called as `torch.optim.Adam(fused=True)` calls it.

    What is returned takes the leaf, [N], and the running means of gradient and of its square and, with amsgrad, the
    largest of those, all to be updated in place; between them the gradient, of the same dtype, which is left as it is.

    Args:
        options: options of the optimizer group.
        count: fp32, of the steps, this one among them.
    """
    kernel: Any = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_  # pyright: ignore
    beta1, beta2 = options["betas"]
    fixed = {name: options[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}
    fixed |= {"beta1": float(beta1), "beta2": float(beta2), "grad_scale": None, "found_inf": None}
    counts = [count]

    def step(param_N: Tensor, grad_N: Tensor, states_N: Sequence[Tensor]) -> None:
        first, second, *largest = states_N
        kernel([param_N], [grad_N], [first], [second], largest, counts, **fixed)

    return step


def set_own_threads(count: int) -> None:
    """Lets operations of the calling thread use `count` threads; all others keep theirs, those to come too.

    torch reads the number of each thread from OpenMP. `torch.set_num_threads` sets it there, and for threads that begin
    later as well: the script's, autograd's. So OpenMP is told alone, in the library that this torch has loaded. A torch
    without OpenMP has one number for all, which is set then.
    """
    torch.get_num_threads()  # a thread takes the number for threads to come when it first asks
    try:
        tell: Callable[[int], object] = ctypes.CDLL(torch._C.__file__).omp_set_num_threads  # pyright: ignore[reportPrivateUsage]
    except AttributeError:
        torch.set_num_threads(count)
        return
    tell(count)


#: Each kernel of attention, and whether it may be chosen now.
_ATTENTION: list[tuple[Any, Callable[[], bool]]] = [
    (getattr(SDPBackend, member), getattr(torch._C, f"_get_{name}_sdp_enabled"))  # pyright: ignore
    for name, member in attention._backend_names.items()  # pyright: ignore
]


class AttentionChoice(NamedTuple):
    """What `scaled_dot_product_attention` chooses its kernel by; noted in less than a microsecond.

    Attributes:
        allowed: flag of each attention kernel, whether it may be chosen; the order is fixed within this process.
        order: all kernels by number, the preferred first.
    """

    allowed: tuple[bool, ...]
    order: tuple[int, ...]

    @classmethod
    def now(cls) -> AttentionChoice:
        """Returns that of this moment."""
        return cls(tuple(may() for _, may in _ATTENTION), tuple(torch._C._get_sdp_priority_order()))  # pyright: ignore

    def kernels(self) -> list[SDPBackend]:
        """Returns the kernels that may be chosen, the preferred first."""
        found = [kernel for (kernel, _), may in zip(_ATTENTION, self.allowed, strict=True) if may]
        return sorted(found, key=lambda kernel: self.order.index(int(kernel)))  # pyright: ignore


def in_backward() -> bool:
    """Whether this thread is inside a backward: in a hook, or in the backward of a custom function."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore


def backward_number() -> int:
    """Returns what tells the backward that runs in this thread from all others; -1 outside of any."""
    return torch._C._current_graph_task_id()  # pyright: ignore


def keeps_graph() -> bool:
    """Whether another backward may follow through the same graph; inside a backward."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore


def adds_gradient(leaf: Tensor) -> bool:
    """Whether the backward that runs in this thread adds to the `.grad` of a leaf; torch.autograd.grad never does."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore
        node = get_gradient_edge(leaf).node
    try:
        return torch._C._will_engine_execute_node(node)  # pyright: ignore
    except RuntimeError:  # it is an input of torch.autograd.grad
        return False


def uses_autograd_threads() -> bool:
    """Whether a backward that this thread begins, or runs, has a thread for each GPU beside this one."""
    return torch._C._is_multithreading_enabled()  # pyright: ignore


def in_transform() -> bool:
    """Whether this thread is inside a transform of torch.func: `grad`, `vmap`, `jvp` or what is made of them."""
    return torch._C._are_functorch_transforms_active()  # pyright: ignore


def out_of_transforms() -> AbstractContextManager[object]:
    """Returns a context whose operations no transform of torch.func sees, though it is inside some."""
    transforms: Any = importlib.import_module("torch._functorch.pyfunctorch")
    return transforms.temporarily_clear_interpreter_stack()


def pass_for_parameter(tensor: Tensor) -> None:
    """Makes `isinstance(tensor, nn.Parameter)` true, as `Module.get_parameter` asks for, of a tensor that is none."""
    bare: Any = tensor
    bare._is_param = True


def untransformed(tensor: Tensor) -> Tensor:
    """Returns what the wrappers that transforms of torch.func put around a tensor have inside."""
    functorch: Any = torch._C._functorch  # pyright: ignore
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Calls `callback` once the backward that is running in this thread has ended."""
    Variable._execution_engine.queue_callback(callback)  # pyright: ignore


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is what torch.compile returned, or was compiled in place."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


#: The module of torch's compiler, which whatever compiles imports.
COMPILER = "torch._dynamo"


def compiler_is_imported() -> bool:
    """Whether torch's compiler was imported in this process, or is being imported."""
    return COMPILER in sys.modules


def run_optimizers_uncompiled() -> Callable[[], None] | None:
    """Has torch's optimizers and recomputation run as they are, in place of importing the compiler to hide from it.

    Two ways lead there, in torch 2.10 to 2.15. Functions marked `torch._disable_dynamo` import the compiler at their
    first call and keep what it makes of them: they get the bare function to keep. `step` of an optimizer breaks the
    graph of a compiler that may trace it: it gets code without that. Both are functions as before, so whoever has one
    (a scheduler, a profiler) has the same.

    Returns:
        what makes all of it as it was; to be called before the compiler is there. None for a torch that does otherwise:
        nothing was changed then.
    """
    marked: Any = getattr(torch, "_disable_dynamo", None)
    # torch.optim takes the name of its module away.
    stepping: Any = getattr(sys.modules.get("torch.optim.optimizer"), "_use_grad_for_differentiable", None)
    if marked is None or stepping is None:
        return None
    guard, step, plain = (getattr(wrap(_nothing), "__code__", None) for wrap in (marked, stepping, _graded))
    if not (isinstance(guard, CodeType) and isinstance(step, CodeType) and isinstance(plain, CodeType)):
        return None
    if _KEPT not in guard.co_consts or guard.co_freevars != ("fn", "recursive"):
        return None
    if not set(step.co_names) <= _STEP_NAMES or step.co_freevars != plain.co_freevars:
        return None
    kinds = [torch.optim.Optimizer, *_below(torch.optim.Optimizer)]
    places: list[Mapping[str, Any]] = [*map(vars, kinds), vars(importlib.import_module("torch.utils.checkpoint"))]
    found = [layer for place in places for value in list(place.values()) for layer in _layers(value)]
    bare = [layer.__wrapped__ for layer in found if layer.__code__ is guard and hasattr(layer, "__wrapped__")]
    bare = [function for function in bare if not hasattr(function, _KEPT)]
    steps = [layer for layer in found if layer.__code__ is step]
    for function in bare:
        setattr(function, _KEPT, function)
    for layer in steps:
        layer.__code__ = plain

    def restore() -> None:
        for function in bare:
            if getattr(function, _KEPT, None) is function:
                delattr(function, _KEPT)
        for layer in steps:
            if layer.__code__ is plain:
                layer.__code__ = step

    return restore


#: Where a function marked `_disable_dynamo` keeps what the compiler made of it.
_KEPT = "__dynamo_disable"
#: All that a `step` does, as torch wraps it, beside calling the optimizer's own.
_STEP_NAMES = frozenset(
    {
        *("torch", "torch._dynamo", "_dynamo", "graph_break", "cast", "Optimizer"),
        *("is_grad_enabled", "set_grad_enabled", "defaults"),
    }
)


def _graded(func: Callable[..., Any]) -> Any:
    """A `step` as torch wraps it, without breaks of a graph. Its code runs with the names of torch.optim.optimizer."""

    def graded(*args: Any, **kwargs: Any) -> Any:
        prev_grad = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(prev_grad)

    return graded


def _nothing() -> None:
    """Is wrapped to see what the wrapper is."""


def _below(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _layers(value: Any) -> Iterator[Any]:
    """Yields a function and those that it wraps, from outside to inside."""
    while isinstance(value, FunctionType):
        yield value
        value = getattr(value, "__wrapped__", None)


def compiler_memory_budget(share: float) -> Callable[[], None]:
    """Sets the share of activations that compiled functions may keep, of what is compiled from now on.

    Returns:
        what puts back the share that was set before.
    """
    config: Any = importlib.import_module("torch._functorch.config")
    before: float = config.activation_memory_budget
    config.activation_memory_budget = share

    def restore() -> None:
        config.activation_memory_budget = before

    return restore


def start_memory_history(device: torch.device) -> None:
    """Lets torch's allocator record each allocation on a GPU with its Python stack; there is one record a process."""
    record: Any = torch.cuda.memory._record_memory_history  # pyright: ignore
    record("all", context="alloc", stacks="python", device=device)


def stop_memory_history() -> None:
    """Ends what `start_memory_history` began, and drops the record."""
    record: Any = torch.cuda.memory._record_memory_history  # pyright: ignore
    record(None)


def profiler_runs() -> bool:
    """Whether a profiler of torch runs in this process, ours or the script's; reads a variable."""
    return _profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]


def start_profiler(*, device: torch.device, memory: bool, stacks: bool, shapes: bool) -> Any:
    """Starts torch's profiler with Kineto, and returns it.

    The class below `torch.profiler.profile`, which imports the compiler as it starts: two seconds in which the other
    ranks would wait.

    Args:
        device: Device whose kernels are traced beside the operations of this thread.
        memory: Whether allocations are traced.
        stacks: Whether operations have their Python stacks.
        shapes: Whether operations have the shapes of their inputs.

    Raises:
        RuntimeError: another profiler runs already.
    """
    if profiler_runs():
        raise RuntimeError("another profiler runs already")
    # Kineto tells each start and end on stderr, in the rank's log.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    make: Any = _profiler.profile
    profiler = make(
        use_kineto=True,
        use_device="cuda" if device.type == "cuda" else None,
        record_shapes=shapes,
        profile_memory=memory,
        with_stack=stacks,
    )
    profiler.__enter__()
    return profiler


def stop_profiler(profiler: Any, *, about: str) -> None:
    """Ends what `start_profiler` began, after the kernels that are under way.

    Args:
        profiler: Profiler that runs.
        about: JSON that the trace has under `dsrun`.
    """
    add_metadata: Any = torch.autograd._add_metadata_json  # pyright: ignore
    add_metadata("dsrun", about)
    profiler.__exit__(None, None, None)


def memory_trace(device: torch.device, *, snapshot: Path | None) -> list[dict[str, Any]]:
    """Returns the events recorded for a GPU, `TraceEntry`s of torch.cuda.memory._snapshot.

    Args:
        device: the GPU.
        snapshot: file for torch's viewer, which is written too.
    """
    memory: Any = torch.cuda.memory
    if snapshot is not None:
        memory._dump_snapshot(str(snapshot))
    with torch.cuda.device(device):
        return memory._snapshot(device)["device_traces"][torch.cuda.current_device()]


def function_modes() -> Sequence[TorchFunctionMode]:
    """Returns the TorchFunctionModes that this thread is inside of, the outermost first."""
    return overrides._get_current_function_mode_stack()  # pyright: ignore


def unseen_by_modes() -> AbstractContextManager[None]:
    """Returns a context whose operations no TorchFunctionMode of the caller sees."""
    return torch._C.DisableTorchFunction()  # pyright: ignore


def unseen_by_dispatch_modes() -> AbstractContextManager[None]:
    """Returns a context whose operations no TorchDispatchMode of the caller sees: none records or replaces them."""
    from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore

    return _disable_current_modes()  # pyright: ignore


class OperationObserver(TorchDispatchMode):
    """A TorchDispatchMode that hears of each operation once it has run, and changes none.

    It is of no concern to compilers: what they compile inside of it is what they compile without it, and no compiler is
    imported for it. torch reads both from methods that are private, or new in one of its versions: in one without
    `ignore_compile_internals` nothing that is compiled may run inside.

    Args:
        observe: Function to call with the operation, its arguments, its keyword arguments and its result.
    """

    #: Operations of higher order, such as flex_attention, are heard of like others.
    supports_higher_order_operators = True
    #: Whether this torch compiles inside of it what it compiles without it.
    is_ignored_by_compilers = hasattr(TorchDispatchMode, "ignore_compile_internals")

    def __init__(self, observe: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()
        self._observe = observe
        if compiler_is_imported() and OperationObserver.__torch_dispatch__ is OperationObserver._dispatch:
            # From now on a compiler may look into whatever runs; for good, as compilers stay.
            hidden: Any = torch.compiler.disable(OperationObserver._dispatch)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            OperationObserver.__torch_dispatch__ = hidden

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Says that compilers compile as they do without this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # hiding the class from the compiler would import that

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._observe(func, args, kwargs or {}, out)
        return out

    __torch_dispatch__ = _dispatch


def named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an operation by the names of its schema, or of its Python signature."""
    schema: Any = getattr(func, "_schema", None)
    if schema is None:
        return dict(inspect.signature(func.__call__).bind(*args, **kwargs).arguments)
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    return {**given, **kwargs}


class EnclosingCalls(NamedTuple):
    """What of torch calls the code that runs, see `enclosing_calls`.

    Attributes:
        function: Name of the innermost custom autograd function whose forward it is; None outside of any.
        function_inputs: Arguments of that function.
        checkpoints: For each torch.utils.checkpoint that runs it again, a function that returns the number of tensors
            saved in it so far; None where all of it runs again.
        is_kept: Whether a selective checkpoint keeps the results of the operation that is asked about.
    """

    function: str | None
    function_inputs: tuple[Any, ...]
    checkpoints: tuple[Callable[[], int] | None, ...]
    is_kept: bool


_FUNCTION_FILE = sys.modules["torch.autograd.function"].__file__
_CHECKPOINT = "torch.utils.checkpoint"


def enclosing_calls(func: Any) -> EnclosingCalls:
    """Returns the calls of torch that this thread is inside of, read from its stack; for a few calls a run only.

    Args:
        func: Operation that selective checkpoints are asked about.
    """
    function: str | None = None
    inputs: tuple[Any, ...] = ()
    checkpoints: list[Callable[[], int] | None] = []
    is_kept = False
    checkpoint_file = getattr(sys.modules.get(_CHECKPOINT), "__file__", None)
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _FUNCTION_FILE and code.co_name == "apply" and function is None:
            function = frame.f_locals["cls"].__name__
            inputs = tuple(frame.f_locals.get("args", ()))
        elif code.co_filename == checkpoint_file:
            if code.co_name == "__torch_dispatch__":
                is_kept |= _keeps(frame.f_locals.get("self"), func)
            elif code.co_name == "checkpoint" and "gen" in frame.f_locals:
                checkpoints.append(_saved_in(frame.f_locals["gen"]))
            elif code.co_name == "forward" and "run_function" in frame.f_locals:
                checkpoints.append(None)
        frame = frame.f_back
    return EnclosingCalls(function, inputs, tuple(checkpoints), is_kept)


def _keeps(mode: Any, func: Any) -> bool:
    """Whether a mode of a selective checkpoint keeps an operation; only torch's own policy can be asked twice."""
    policy: Any = getattr(mode, "policy_fn", None)
    if policy is None or policy.__module__ != _CHECKPOINT:
        return False
    checkpoint: Any = sys.modules[_CHECKPOINT]
    decided = policy(None, func)
    policies = checkpoint.CheckpointPolicy
    return decided in (policies.MUST_SAVE, policies.PREFER_SAVE)


def _saved_in(generator: Any) -> Callable[[], int] | None:
    """Returns what counts the tensors saved in a checkpoint that ends with the last of them; None for another."""
    inner = getattr(generator, "gi_frame", None)
    made = None if inner is None else inner.f_locals.get("new_frame")
    if made is None or not getattr(made, "early_stop", False):
        return None
    return lambda: len(made.weak_holders)


def without_overrides() -> AbstractContextManager[None]:
    """Returns a context whose operations go past `__torch_function__` of their arguments' classes."""
    return torch._C.DisableTorchFunctionSubclass()  # pyright: ignore
