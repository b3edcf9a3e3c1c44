"""Copies of the working folder on the job's hosts."""
