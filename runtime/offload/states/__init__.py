"""Masters and states of a range as the host steps them."""
