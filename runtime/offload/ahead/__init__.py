"""Steps that are taken before it is known that they count."""
