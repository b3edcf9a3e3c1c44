"""Trackers that are given a job's scalars, each in a process of its own."""
