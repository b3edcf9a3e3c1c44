"""Gradients of units: reduced, summed, and missing."""
