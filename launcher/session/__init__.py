"""One job as the front end runs it: attempts, links to agents, signals, the end."""
