"""FLOPs of a training step: counted by operations, and what share of a device's peak they are."""
