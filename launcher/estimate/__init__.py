"""What a launch will need, for `dsrun plan` and before a start."""
