"""dsrun as a package named `deepspeed`, for scripts that import that name; on the path only where it is asked for.

Installing dsrun never changes what `import deepspeed` gives. `dsrun --as-deepspeed train.py`, `python -m
dsrun.as_deepspeed train.py` and `import dsrun.as_deepspeed.install` (in a notebook) put the folder `site` beside this
file on the path of one job: a package of re-exports, and the metadata of a distribution. Nothing of it is imported
here.
"""
