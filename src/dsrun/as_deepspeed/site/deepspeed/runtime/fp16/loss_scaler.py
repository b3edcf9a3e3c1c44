"""deepspeed.runtime.fp16.loss_scaler: loss scales, as they lie in checkpoints of DeepSpeed."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.loss_scalers": [
            "CONSECUTIVE_HYSTERESIS",
            "DELAYED_SHIFT",
            "DynamicLossScaler",
            "INITIAL_LOSS_SCALE",
            "LossScaler",
            "LossScalerBase",
            "MIN_LOSS_SCALE",
            "SCALE_WINDOW",
            "create_loss_scaler as CreateLossScaler",
        ],
    },
)
