"""Trackers, one module each: what a tracker does with points."""
