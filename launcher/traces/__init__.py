"""Profiles of ranks: read, summed up, and merged into one file. Profiles nothing."""
