"""Work, bytes and collectives of a step, and the shortest time each takes."""
