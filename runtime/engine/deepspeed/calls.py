"""Calls of scripts written for DeepSpeed: checkpoints, weights, states, loaders, compiling, losses of their own.

What such scripts ask stands in `getters.py`, and what they ask in vain in `missing.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dsrun.contract.environment import stands_for_deepspeed
from dsrun.errors import InputError

from ...data.loader import TrainingLoader
from ..components import Components
from ..compose.data import Data
from ..model.sharded import ShardedModel
from ..progress import Progress
from ..saving.load import LoadOptions
from ..saving.resume import what_lacks

#: Routes of `deepspeed_io` whose data is looked at and not learnt from.
_EACH_SAMPLE_ONCE = ("eval", "predict")


class Calls:
    """Calls under DeepSpeed's names that stand on no other page; the engine's components do what they ask."""

    _components: Components
    _data: Data
    _is_compiled: bool
    _progress: Progress
    _sharded: ShardedModel
    device: torch.device
    dp_world_size: int
    global_rank: int
    module: nn.Module
    wait_for_checkpoint: Callable[[], None]

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the module's forward, as its own `compile` does. Blocks compiled one by one give fewer graph breaks.

        Args:
            backend: backend of `torch.compile`.
            compile_kwargs: further arguments of torch.compile.
            schedule: DeepSpeed's argument, refused unless None: DeepSpeed's compiler passes do not exist here.
            compiled_autograd_enabled: DeepSpeed's argument, refused if true: hooks follow the backward.

        Raises:
            InputError: an argument that is not taken.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise InputError(
                f"engine.compile: schedule is {schedule} and compiled_autograd_enabled is {compiled_autograd_enabled}",
                hint="leave both out",
            )
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._is_compiled

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str | None = None,
        pin_memory: bool = True,
        data_sampler: None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> TrainingLoader:
        """Makes a loader of a map-style dataset, as `initialize` does of training_data; the engine does not save it.

        Args:
            dataset: the same on every rank.
            batch_size: samples of a rank in a batch; the micro batch by default.
            route: "eval" or "predict": every iteration is the whole dataset, in its own order; else as for training.
            pin_memory: make batches in page-locked memory, where the engine computes on a GPU.
            data_sampler: DeepSpeed's argument, refused unless None: the loader itself divides the samples among the
                ranks.
            collate_fn: function that makes a batch of a list of samples; None for the default.
            num_local_io_workers: processes that make batches ahead; `dataloader_num_workers` of the config by default.

        Raises:
            InputError: an argument that is not taken.
            ModelError: the dataset has no length, or too few samples.
        """
        if data_sampler is not None:
            raise InputError(
                "engine.deepspeed_io: data_sampler is given; the loader shares samples out over the ranks itself",
                hint="leave it out, or iterate your own DataLoader",
            )
        options = self._data.options
        only_looks = route in _EACH_SAMPLE_ONCE
        return TrainingLoader(
            dataset,
            micro_batch=batch_size or self._progress.batch.micro_batch,
            rank=self._data.rank,
            size=self.dp_world_size,
            collate_fn=collate_fn,
            options=replace(
                options,
                end="fill" if only_looks else options.end,
                workers=options.workers if num_local_io_workers is None else num_local_io_workers,
            ),
            shuffle=not only_looks,
            pin_for=self.device if pin_memory else None,
        )

    def empty_partition_cache(self) -> None:
        """Does nothing: what is gathered lies in slots of a fixed size, and none of it is kept for later."""

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | os.PathLike[str] | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves everything needed to go on, on any number of ranks and at any stage; every rank must call.

        In the middle of a global batch, what there was after the last update: see [Note: between updates] in
        `resume_state.py`.

        Unless the config says `checkpoint.asynchronous` false, training goes on while the checkpoint is written:
        `latest` names it once it is complete, and `wait_for_checkpoint` waits for that. The end of the script does too.

        Args:
            save_dir: checkpoint folder, shared by all ranks, or an address such as `s3://bucket/run`. None, which
                DeepSpeed's own call cannot take either, is refused.
            tag: name inside it; `global_step<N>` by default. Where ranks give different ones, rank 0's is taken, see
                `checkpoint.tag_validation`.
            client_state: plain values, arrays and tensors that `load_checkpoint` returns; rank 0's are stored.
            save_latest: whether the file `latest` names this tag afterwards.
            exclude_frozen_parameters: whether parameters that are not trained are left out.

        Returns:
            True.

        Raises:
            InputError: `save_dir` is None, empty, no path, or an address of nothing.
            CheckpointError: on every rank, if one rank could not save, or an earlier save has failed since; nothing
                was published. What goes wrong later is raised by `step`, the next save or load, or `destroy`.
        """
        self._components.check_trains.check_there("engine.save_checkpoint")
        self._components.checkpoints.save(
            save_dir, tag, client_state or {}, save_latest=save_latest, frozen=not exclude_frozen_parameters
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str] | None = None,
        tag: str | int | os.PathLike[str] | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
        *,
        missing_ok: bool | None = None,
        load_random_state: bool = True,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads a checkpoint that any number of ranks saved at any stage; every rank must call.

        Args:
            load_dir: checkpoint folder or address; may be left out in a job that was started again.
            tag: name inside it. By default the one that a job which was started again goes on from, if it lies in
                `load_dir`, else the one that `latest` names.
            load_module_strict: tensors of the checkpoint that the model does not have are an error.
            load_optimizer_states: whether optimizer states and hyperparameters are loaded.
            load_lr_scheduler_states: whether the state of the learning-rate schedule is loaded.
            load_module_only: whether only parameters and buffers are loaded.
            custom_load_fn: DeepSpeed's argument, refused unless None: such a function would see only a rank's slices.
            missing_ok: return (None, None) where there is no checkpoint yet, instead of an error. None: an error, but
                for scripts to which dsrun is DeepSpeed, whose way this is; those are told.
            load_random_state: have this process's random numbers go on as well, see `resume_state.py`; the last thing
                before training, then. On more ranks than there were, new ones draw numbers of their own.

        What this job itself is still writing there, by any engine, is waited for first.

        Where a job that was started again has a copy in memory (`checkpoint.memory_copy`) that is newer than what
        would be loaded, the first call without `tag` and `load_module_only` goes on from that.

        A load ends the global batch that is under way: its gradients, losses, tokens and samples are given up, and the
        next micro step is its first, also with `load_module_only`. Where nothing is loaded the batch goes on.

        Returns:
            the tag's folder, or that of the copy in memory, and the client state it was saved with.

        Raises:
            InputError: there is nothing to choose by: no `load_dir`, and the job was not started again; or it is an
                address of nothing.
            CheckpointError: on every rank, where one of them finds none, or one that is damaged or of another model.
                Nothing was changed then, and training may go on; unless a file turns out damaged while it is read.
                After that forward, backward, `step` and saving are refused until a load has succeeded.
        """
        if custom_load_fn is not None:
            raise InputError(
                "load_checkpoint: custom_load_fn is given, and parameters may lie in slices",
                hint="read the weights yourself and pass them to engine.load_module_state_dict",
            )
        self._components.check_trains.check_there("engine.load_checkpoint")
        options = LoadOptions(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            progress=not load_module_only,
            random=load_random_state and not load_module_only,
        )
        found, client_state = self._components.checkpoints.load(
            load_dir,
            tag,
            options,
            module_only=load_module_only,
            missing_ok=stands_for_deepspeed() if missing_ok is None else missing_ok,
            wait=self.wait_for_checkpoint,
        )
        if found is not None:
            self._components.forget_batch()
        if found is None and missing_ok is None and self.global_rank == 0:
            print(f"dsrun: load_checkpoint: {what_lacks(load_dir)}; nothing was loaded", flush=True)
        return found, client_state

    def module_state_dict(
        self, exclude_frozen_parameters: bool = False, *, all_ranks: bool = False
    ) -> dict[str, Tensor] | None:
        """Returns what `state_dict` of the plain model would, on the CPU, in the dtypes that forward reads.

        Args:
            exclude_frozen_parameters: whether parameters that are not trained are left out.
            all_ranks: every rank gets it, and needs the memory for it.

        Returns:
            names to tensors, tied ones shared, those that are cut over ranks put together; on rank 0 only, and None
            elsewhere, unless `all_ranks`.
        """
        if self._sharded.plan.shard_parameters:
            self._components.check_trains.check_there("engine.module_state_dict")
        return self._components.weights.state_dict(frozen=not exclude_frozen_parameters, all_ranks=all_ranks)

    def load_module_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Sets parameters, with their fp32 masters, and buffers; optimizer states stay as they are.

        Args:
            state_dict: whole tensors, the same on every rank; of one that is cut over ranks each takes its part.
            strict: whether the dict must have all parameters and persistent buffers, and no others.

        Raises:
            CheckpointError: naming every tensor that is missing, unexpected or of another shape.
            InputError: it is no dict of tensors.
        """
        self._components.check_trains.check_there("engine.load_module_state_dict")
        self._components.weights.load_state_dict(state_dict, strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str | os.PathLike[str] = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        *,
        max_shard_bytes: int | None = None,
    ) -> bool:
        """Saves the whole weights for other programs, at every stage; rank 0 writes.

        Args:
            save_dir: folder, made if it is not there.
            save_filename: name in it; one that ends in `.safetensors` gets that format, others torch's, for which rank
                0 holds the whole model in host memory.
            exclude_frozen_parameters: whether parameters that are not trained are left out.
            max_shard_bytes: most bytes of tensors in one safetensors file; a larger model gets several files, with an
                index that Hugging Face's loaders read. None: one file.

        Returns:
            True.

        Raises:
            InputError: `save_dir` is None, empty, no path or an address, or shards make no sense.
            CheckpointError: on every rank, if rank 0 could not write; nothing was left or replaced.
        """
        self._components.check_trains.check_there("engine.save_16bit_model")
        frozen = not exclude_frozen_parameters
        self._components.weights.save(
            save_dir,
            save_filename,
            frozen=frozen,
            max_shard_bytes=max_shard_bytes,
            whole=lambda: self.module_state_dict(exclude_frozen_parameters),
        )
        return True

    def save_fp16_model(
        self, save_dir: str | os.PathLike[str], save_filename: str | os.PathLike[str] = "pytorch_model.bin"
    ) -> bool:
        """Saves as `save_16bit_model` does, whose older name this is."""
        return self.save_16bit_model(save_dir, save_filename)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether whole weights can be saved: always."""
        return True

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """See `module_state_dict`: a private name of DeepSpeed's that scripts call."""
        return self.module_state_dict(exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """See `module_state_dict`: a private name of DeepSpeed's that scripts call."""
        return self.module_state_dict(exclude_frozen_parameters)

    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> int:
        """Moves states to host memory until `reload_states`, between steps.

        See [Note: what may leave] and [Note: whose memory] in `engine/offload_states.py`.

        Until then the model computes, and what needs states (backward, checkpoints, `safe_get_*`) is refused.

        Args:
            include: `optim_states`, `hp_params` and `lp_grads`, or some of them; None: all. DeepSpeed's `lp_params` and
                `contiguous_grad_buffer` are taken and stay. Members of its enumeration are known by their value.
            device: `cpu`.
            pin_memory: whether the host memory is page-locked; if so, it is kept for the next call, see [Note: whose
                memory].
            non_blocking: return while copies go on; what the device is given next waits for them. What is free stays
                with torch's allocator then, for tensors of this process alone.

        Returns:
            bytes of states that the device has no more. With what else torch has kept, they are free to every process.

        Raises:
            InputError: another device, or a name that is none of these.
            ModelError: states are away already, or an update is not over yet that a script has to end.
        """
        return self._components.states.move_out(include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back what `offload_states` has moved; nothing happens where it has moved nothing.

        Args:
            non_blocking: return while copies go on; what the device is given next waits for them.
        """
        self._components.states.move_back(non_blocking=non_blocking)

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the loss scale, for a `backward` of the script's own; without fp16 that is the loss.

        Args:
            loss: scalar, computed from the model's output. Do not divide it by the accumulation steps.

        Raises:
            ModelError: the loss is no scalar or has no graph, is scaled already, states are in host memory, or the
                engine has no optimizer.
        """
        return self._components.script.scale(loss)
