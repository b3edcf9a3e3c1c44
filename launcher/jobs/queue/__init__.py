"""Jobs that wait for GPUs of this machine, and jobs that hold some."""
