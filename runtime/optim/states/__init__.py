"""States of optimizers: where they lie, in which format, and how they are saved."""
