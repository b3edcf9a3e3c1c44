"""DeepSpeed's commands: their words as dsrun's. None does what dsrun cannot, or is in PATH outside of a job."""
