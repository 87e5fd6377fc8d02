"""Library: how a verifier is served, alone or with its drafter: the plan, the drafter's files, and what one asks the server."""
