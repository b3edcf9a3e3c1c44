"""What a run's memory was used for: samples, what follows from them, and how they are shown. Measures nothing."""
