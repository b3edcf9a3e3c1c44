"""The run that is estimated: its settings, and what it may use."""
