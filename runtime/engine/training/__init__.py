"""One training step of an engine: its backwards, and its optimizer step with all that goes by it."""
