"""Layers that come as a list: weighed, cut over stages, built and run. The model that they are: `module.py` above."""
