"""What launcher and ranks agree on: variables, error file, heartbeats, ranks of other launchers."""
