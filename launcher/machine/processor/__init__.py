"""Processors of this machine: cores, NUMA nodes, and the cores that a rank is bound to."""
