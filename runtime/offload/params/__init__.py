"""Slices of parameters that lie outside of the device."""
