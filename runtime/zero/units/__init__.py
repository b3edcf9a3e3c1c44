"""Units: parameters that are gathered, reduced and updated together."""
