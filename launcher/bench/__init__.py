"""Measured speeds of hosts: memory, disks, GPUs, network."""
