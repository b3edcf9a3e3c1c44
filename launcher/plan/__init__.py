"""The launch as a value, and the text that becomes it."""
