"""deepspeed.runtime.lr_schedules: learning rates by the config's names."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.optim.schedules.registry": ["VALID_LR_SCHEDULES"],
        "dsrun.runtime.optim.schedules.cycle": ["LRRangeTest", "OneCycle"],
        "dsrun.runtime.optim.schedules.warm_up": ["WarmupCosineLR", "WarmupDecayLR", "WarmupLR"],
        "dsrun.runtime.optim.schedules.tuning": ["*"],
    },
)
