"""Which blocks are recomputed."""
