"""What this machine has and allows, as one report, and the rules that judge it."""
