"""What launcher and ranks agree on: variables, error file, names of files, heartbeats, ranks of other launchers."""
