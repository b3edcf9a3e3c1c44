"""Rules over the report of a machine: what is wrong, how bad it is, and the way out."""
