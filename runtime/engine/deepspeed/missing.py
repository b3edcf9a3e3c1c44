"""Names of DeepSpeed's engine that are not here, each with what to use instead. Its package: `deepspeed_missing.py`.

A name that is absent raises AttributeError, so `hasattr`, by which clients ask, tells the truth.
"""

from __future__ import annotations

from collections.abc import Mapping

_PIPELINE = "there are no pipeline stages; call forward, backward and step"

#: Name to reason, as it ends a sentence.
ENGINE: Mapping[str, str] = {
    "allreduce_gradients": "engine.backward reduces gradients as they come",
    "coalesce_grad_reduction": "engine.backward reduces a unit at a time; engine.no_sync() puts reductions off",
    "eval_batch": _PIPELINE,
    "get_batch_info": "ask train_batch_size(), train_micro_batch_size_per_gpu() and gradient_accumulation_steps()",
    "reset_activation_shape": _PIPELINE,
    "set_batch_fn": _PIPELINE,
    "set_dataiterator": _PIPELINE,
    "set_dataloader": _PIPELINE,
    "train_batch": _PIPELINE,
}
