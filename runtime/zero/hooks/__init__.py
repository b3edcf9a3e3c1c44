"""Hooks on modules: when a unit begins and ends, and reads outside of units."""
