"""How a running job looks."""
