"""The agent, one a host: its host's ranks, their output, their end."""
