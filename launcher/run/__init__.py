"""One job put together."""
