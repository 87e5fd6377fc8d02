"""Stage: the serving plan, and the server that runs it."""
