"""Checkpoints of an engine: what is saved and loaded, when, and on which signals."""
