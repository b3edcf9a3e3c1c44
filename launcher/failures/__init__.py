"""Failures as values: causes, which one came first, who hangs, whether to start again. No I/O."""
