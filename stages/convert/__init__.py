"""To and from the speculators format."""
