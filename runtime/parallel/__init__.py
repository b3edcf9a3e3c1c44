"""Axes of ranks beside data: how a model is cut along each, and what the parts exchange."""
