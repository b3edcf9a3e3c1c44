"""Pipeline schedules as values: made, given their communication, proved and priced, without torch."""
