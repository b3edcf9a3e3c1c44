"""Which hosts there are, and where a hostfile is wrong."""
