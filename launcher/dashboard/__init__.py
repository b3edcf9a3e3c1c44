"""How a run fares, put together from its folder: as a page, a line, an object and metrics. Changes nothing of it."""
