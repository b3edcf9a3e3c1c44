"""Optimizers over local shards, clipping, learning-rate schedules."""
