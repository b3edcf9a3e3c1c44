"""Bytes of state and of copies of it."""
