"""Joining a job: devices, backends, process groups, and leaving them."""
