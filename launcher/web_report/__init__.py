"""A page about jobs: one file that a browser shows without asking anybody else."""
