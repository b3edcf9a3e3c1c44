"""What a cluster's scheduler says of the job that this process runs in, and scripts for it: one scheduler a module."""
