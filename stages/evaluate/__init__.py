"""Stage evaluate: acceptance and speed of the drafter on held-out prompts."""
