"""Questions to hosts before there is a job: client and server."""
