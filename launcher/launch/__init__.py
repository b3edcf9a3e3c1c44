"""Flags, machine and config become one checked launch."""
