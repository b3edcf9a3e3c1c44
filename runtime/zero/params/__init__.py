"""Parameters of units where forward and backward need them."""
