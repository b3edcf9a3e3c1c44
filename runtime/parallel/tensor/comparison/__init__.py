"""Whether a plan is right: parts of the model are run cut and whole in the first forward, and compared."""
