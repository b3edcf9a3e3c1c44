"""Optimizers of our own, and the names of others."""
