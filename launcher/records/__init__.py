"""The records of a job, read by what watches it. Writes nothing and shows nothing."""
