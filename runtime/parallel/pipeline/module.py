"""A model as a list of layers in pipeline stages, by DeepSpeed's name and arguments. Runs no schedule.

[Note: layers in common]
Every use of a key has a module with parameters of its own, whose first values are equal: the first use in the model
under `tied_modules.<key>`, the others under their layer's number. All parameters are in common, not those of
`tied_weight_attr` alone. So gradients of each use are summed up over micro batches for themselves, and then over the
uses, wherever the model is cut; a parameter that two uses in one stage shared would add them up in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dsrun.errors import ModelError

from ...generators import host_kept
from ...stacks import AbsentBlock
from .grid import PipelineParallelGrid
from .layer_list.build import LayerWeight, Seeds, label_of, twins_on_meta, weigh, with_forward
from .layer_list.chunks import LayerStages
from .layer_list.cut import bounds_of, check_layers, check_shared, checked_topology, ranks_of_chunks
from .layer_list.run import PlacedLayer, Recompute, has_own_params, recomputed, run_layers
from .layers import LayerSpec, TiedLayerSpec
from .ranks import JobRank, job_rank
from .stages import Partition, TiedParameter
from .topology import ProcessTopology, topology_of

_FILES = "engine.save_checkpoint and load_checkpoint write and read all stages, for any number of them"
#: Names of DeepSpeed's class that are not here, and why.
_ABSENT: Mapping[str, str] = {
    "allreduce_tied_weight_gradients": "the engine sums up gradients of tied layers in train_batch",
    **dict.fromkeys(("ckpt_prefix", "ckpt_layer_path", "ckpt_layer_path_list"), _FILES),
    **dict.fromkeys(("save_state_dict", "load_state_dir"), _FILES),
}


class PipelineModule(nn.Sequential):
    """A list of layers, of which this rank builds those of its stage.

    A layer is a module, a `LayerSpec`, a `TiedLayerSpec` or a function; it is given what the one before has returned,
    one tensor or a tuple. Modules that other ranks have are let go. Parameters are called by their layer's number,
    `0.weight`, whatever the stage; for tied ones see [Note: layers in common]. For first values, see
    [Note: first values of layers].

    Args:
        layers: layers, or a `torch.nn.Sequential` of them.
        num_stages: stages; None: those of the topology.
        topology: grid of the ranks, with the stages as its slowest axis; None: as many copies as there are ranks for.
        loss_fn: function of (output, label); None: the last layer returns the loss.
        seed_layers: whether generators are seeded before each layer's forward too, by micro batch and layer.
        seed_fn: function that seeds all generators, where `seed_layers` is set.
        base_seed: seed of the first layer.
        partition_method: `parameters`, `uniform`, `type:REGEX` for classes whose name has a match, or the first layer
            of each chunk and the number of layers at the end.
        activation_checkpoint_interval: layers that are run again together in backward; 0: none.
        activation_checkpoint_func: function that runs them so.
        checkpointable_layers: names of the classes that may be run again; None: all with parameters.
        dynamic_shape: DeepSpeed's switch; shapes may always differ.
        virtual_stages: chunks of a rank.
        placement: `loop`, where neighbouring chunks go round the ranks, or `v`, where they go to and fro.
        job: this rank and the ranks of the job; None: those of torch's process group, or of the environment.

    Attributes:
        num_stages: stages.
        stage_id: stage of this rank.
        global_rank: rank of this process in the job.
        world_size: ranks of the job.
        parts: first layer of each chunk, and the number of layers at the end.
        rank_of: stage of each chunk.
        own: chunks of this rank.
        virtual_stages: chunks of a rank.
        placement: `loop` or `v`.
        loss_fn: function of (output, label).
        forward_funcs: modules and functions of this rank, in order.
        tied_modules: modules by their key: of this rank's first use of each that is the model's first use.
        tied_weight_attrs: names of parameters by key.
        activation_checkpoint_interval: layers that are run again together.
        activation_checkpoint_func: function that runs them so.
        checkpointable_layers: names of the classes that may be run again.
        seed_layers: whether generators are seeded before each layer's forward.
        seed_fn: function that seeds all generators.
        base_seed: seed of the first layer.
        dynamic_shape: DeepSpeed's switch.
        micro_offset: forwards of this rank's first chunk so far.

    Raises:
        ModelError: stages, layers, ranks or the method do not go together.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = recomputed,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
        *,
        virtual_stages: int = 1,
        placement: str = "loop",
        job: JobRank | None = None,
    ) -> None:
        super().__init__()
        here = job_rank() if job is None else job
        self.global_rank, self.world_size = here.rank, here.world_size
        self._topo = checked_topology(num_stages, topology, self.world_size)
        self._grid = PipelineParallelGrid(self._topo, job=here)
        self.num_stages = self._grid.pipe_parallel_size
        self.stage_id = self._grid.stage_id
        self.rank_of = ranks_of_chunks(self.num_stages, virtual_stages, placement)
        self.own = tuple(chunk for chunk, rank in enumerate(self.rank_of) if rank == self.stage_id)
        self.virtual_stages, self.placement = virtual_stages, placement
        if checkpointable_layers is not None and not isinstance(checkpointable_layers, list):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(
                f"PipelineModule: checkpointable_layers is {checkpointable_layers!r}; expected a list of class names"
            )
        if has_own_params(loss_fn):
            raise ModelError(
                f"PipelineModule: loss_fn is a {type(loss_fn).__name__} with parameters, which no stage would train",
                hint="make it a part of the last layer, and let loss_fn take what that returns",
            )
        self.loss_fn = loss_fn
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.checkpointable_layers = checkpointable_layers
        self.activation_checkpoint_func = activation_checkpoint_func
        self.dynamic_shape = dynamic_shape
        self.micro_offset = 0
        self.set_checkpoint_interval(activation_checkpoint_interval)

        specs = list(layers)
        chunks = len(self.rank_of)
        check_layers(specs, chunks, inner=PipelineModule)
        self._weights: dict[int, LayerWeight] = {}
        costs: list[float] = []

        def weighed() -> list[float]:
            # One chunk has them all: nothing is built to be weighed.
            costs.extend(
                float(self._weigh(specs, index).trainable) if chunks > 1 else 1.0 for index in range(len(specs))
            )
            return costs

        self.parts = bounds_of(specs, chunks, partition_method, costs=weighed)
        self._partition = Partition(tuple(self.parts), tuple(map(str, range(len(specs)))), tuple(costs))
        check_shared(specs, self._partition)
        self.forward_funcs: list[Callable[[Any], Any]] = []
        self._placed: dict[int, list[PlacedLayer]] = {chunk: [] for chunk in self.own}
        self._runs: dict[int, int] = dict.fromkeys(self.own, 0)
        self._tied: list[TiedParameter] = []
        self._build(specs)
        self._weights.clear()
        self._looks = twins_on_meta(specs) if self.num_stages > 1 else []

    # What DeepSpeed's class has.

    def forward(self, forward_input: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns what the last layer makes of the input; on one stage, which has all layers.

        Args:
            forward_input: tensor, or tuple of them.

        Raises:
            ModelError: other stages have layers.
        """
        if len(self.own) < len(self.rank_of):
            raise ModelError(
                f"PipelineModule: stage {self.stage_id} of {self.num_stages} has {len(self.forward_funcs)} of "
                f"{self.parts[-1]} layers, and cannot run the model alone",
                hint="call engine.train_batch or engine.eval_batch on every rank",
            )
        value = forward_input
        for chunk in self.own:
            value = self.run_chunk(chunk, value)
        return value

    def partitions(self) -> list[int]:
        """Returns the first layer of each chunk, and the number of layers at the end; a stage has one chunk or more."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """Returns the stage that has a layer.

        Args:
            layer_idx: number of the layer.

        Raises:
            ModelError: there is no such layer.
        """
        return self.rank_of[self._chunk_of(layer_idx)]

    def topology(self) -> ProcessTopology:
        """Returns the grid of the ranks."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """Returns this rank's place among stages, their copies and, once an engine is made, ranks that share layers."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Returns the number of stages."""
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        """Sets how many layers are run again together in backward.

        Args:
            interval: number of layers; 0: none is run again.

        Raises:
            ModelError: the number is below 0.
        """
        if interval < 0:
            raise ModelError(f"PipelineModule: activation_checkpoint_interval is {interval}; expected 0 or more")
        self.activation_checkpoint_interval = interval

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Returns this rank's weights that `tied_weight_attr` names, each with torch's group of its key's ranks.

        All ranks of those groups must call.

        Raises:
            ModelError: ranks have not joined.
        """
        if self.num_stages == 1:
            return []
        found: list[tuple[nn.Parameter, Any]] = []
        for key in sorted(self._uses):
            stages = sorted({self.stage_owner(index) for index in self._uses[key]})
            if self.stage_id in stages:
                ranks = [self._grid.stage_to_global(stage) for stage in stages]
                group = self._grid.group_of(ranks, "get_tied_weights_and_groups")
                module = self._first_own[key]
                found += [(module.get_parameter(name), group) for name in self.tied_weight_attrs[key]]
        return found

    def get_additional_losses(self) -> dict[str, Any] | None:
        """Returns further losses of the model by their names, for reports; None: a subclass says which."""
        return None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each layer of this rank.

        Args:
            args: arguments of `torch.compile`.
            kwargs: keyword arguments of `torch.compile`.
        """
        for chunk, layers in self._placed.items():
            for place, layer in enumerate(layers):
                if isinstance(layer.call, nn.Module):
                    layer.call.compile(*args, **kwargs)
                else:
                    call = torch.compile(layer.call, *args, **kwargs)
                    layers[place] = PlacedLayer(layer.index, call, layer.label, layer.has_params)
            self._placed[chunk] = layers
        self.forward_funcs = [layer.call for layers in self._placed.values() for layer in layers]

    def __getattr__(self, name: str) -> Any:
        """Refuses names of DeepSpeed's class that are not here, with the reason."""
        if name in _ABSENT:
            raise AttributeError(f"PipelineModule has no attribute {name!r}: {_ABSENT[name]}")
        return super().__getattr__(name)

    # What runs schedules.

    def share_layers(self, tensor: int) -> None:
        """Has `mpu` and `topology` know how many ranks share each layer, which the config says and not the list.

        Args:
            tensor: number of ranks.
        """
        if tensor != self._grid.model_parallel_size:
            self._topo = topology_of(stages=self.num_stages, tensor=tensor, ranks=self.world_size)
            self._grid = PipelineParallelGrid(self._topo, job=JobRank(self.global_rank, self.world_size))

    def stages(self) -> LayerStages:
        """Returns this rank's chunks, for whoever runs a schedule."""
        return LayerStages(self, self._tied)

    def partition(self) -> Partition:
        """Returns which layers each chunk has, and what they cost."""
        return self._partition

    def whole_on_meta(self) -> PipelineModule:
        """Returns the list with all its layers in one stage, on the meta device: names, classes and shapes alone.

        Layers that were given as modules are as they were when the list was made.
        """
        assert self.num_stages > 1, "a rank of one stage has all layers"
        with host_kept(), torch.device("meta"):
            whole = PipelineModule(self._looks, num_stages=1, job=JobRank(0, 1), partition_method="uniform")
        if hasattr(self, "config"):
            whole.config = self.config
        return whole

    def run_chunk(self, chunk: int, value: Any) -> Any:
        """Returns what a chunk of this rank makes of its input.

        Args:
            chunk: number of the chunk.
            value: tensor, or tuple of them.
        """
        self._runs[chunk] += 1
        if chunk == self.own[0]:
            self.micro_offset += 1
        recompute = Recompute(
            self.activation_checkpoint_interval,
            self.activation_checkpoint_func,
            self.checkpointable_layers,
            type(self).__name__,
        )
        seeds = Seeds(self.base_seed, self.seed_fn) if self.seed_layers else None
        return run_layers(self._placed[chunk], value, recompute=recompute, seeds=seeds, micro=self._runs[chunk])

    def modules_of(self, chunk: int) -> list[nn.Module]:
        """Returns the modules of a chunk of this rank, each once.

        Args:
            chunk: number of the chunk.
        """
        modules = {id(layer.call): layer.call for layer in self._placed[chunk] if isinstance(layer.call, nn.Module)}
        return list(modules.values())

    def _weigh(self, specs: list[Any], index: int) -> LayerWeight:
        if index not in self._weights:
            self._weights[index] = weigh(specs[index], index)
        return self._weights[index]

    def _chunk_of(self, index: int) -> int:
        for chunk in range(len(self.rank_of)):
            if index in self._partition.layers_of(chunk):
                return chunk
        raise ModelError(f"PipelineModule: there is no layer {index} of {self.parts[-1]}")

    def _build(self, specs: list[Any]) -> None:
        self._uses: dict[str, list[int]] = {}
        for index, layer in enumerate(specs):
            if isinstance(layer, TiedLayerSpec):
                self._uses.setdefault(layer.key, []).append(index)
        self.tied_weight_attrs = {key: specs[uses[0]].tied_weight_attr for key, uses in self._uses.items()}
        self._first_own: dict[str, nn.Module] = {}
        tied = nn.ModuleDict()
        if self._uses:
            self.tied_modules = tied
        else:
            # No child: a stack of equal blocks, and nothing else, is found by its children being of one class.
            object.__setattr__(self, "tied_modules", tied)
        for index, layer in enumerate(specs):
            chunk = self._chunk_of(index)
            if chunk in self._placed:
                self._add(index, chunk, layer, specs)
            elif isinstance(layer, nn.Module | LayerSpec) and not self._is_first_use(index, layer):
                place = self._weigh(specs, index).place
                assert isinstance(place, AbsentBlock), f"layer {index} is a module"
                self.add_module(str(index), place)

    def _is_first_use(self, index: int, layer: Any) -> bool:
        return isinstance(layer, TiedLayerSpec) and self._uses[layer.key][0] == index

    def _add(self, index: int, chunk: int, layer: Any, specs: list[Any]) -> None:
        call: Any = layer
        label, has_params = label_of(layer), has_own_params(layer)
        if isinstance(layer, LayerSpec):
            first = self._uses[layer.key][0] if isinstance(layer, TiedLayerSpec) else index
            seeds = Seeds(self.base_seed, self.seed_fn if self.seed_layers else None)
            with seeds.of_layer(first):
                call = specs[first].build()
            has_params = has_own_params(call)
        if isinstance(layer, TiedLayerSpec):
            self._tie(index, chunk, layer, call)
            if layer.forward_fn is not None:
                with_forward(call, layer.forward_fn)
                label, has_params = "", False  # a function of a module, when layers to run again are chosen
        if isinstance(call, nn.Module) and not self._is_first_use(index, layer):
            self.add_module(str(index), call)
        self._placed[chunk].append(PlacedLayer(index, call, label, has_params))
        self.forward_funcs.append(call)

    def _tie(self, index: int, chunk: int, layer: TiedLayerSpec, module: nn.Module) -> None:
        uses = self._uses[layer.key]
        self._first_own.setdefault(layer.key, module)
        if index == uses[0]:
            self.tied_modules[layer.key] = module
        chunks = tuple(sorted({self._chunk_of(use) for use in uses}))
        for name, param in module.named_parameters():
            noted: Any = param
            noted.ds_pipe_replicated = index != uses[0]
            if len(uses) > 1:
                self._tied.append(TiedParameter(f"tied_modules.{layer.key}.{name}", param, chunk, chunks))
