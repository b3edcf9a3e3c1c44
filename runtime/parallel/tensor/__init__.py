"""Tensor parallelism: layers cut over ranks, each of which computes a part of every product."""
