"""Memory that a file takes shape in, and the process that writes it."""
