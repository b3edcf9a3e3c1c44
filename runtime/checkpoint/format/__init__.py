"""Entries of state, their files and tensors, and reading them."""
