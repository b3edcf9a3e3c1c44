"""Sequence parallelism of Megatron: between cut layers each rank has a slice of the sequence."""
