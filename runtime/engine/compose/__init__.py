"""Steps of `initialize` that run once: arguments, joining, agreement, optimizer, first report."""
