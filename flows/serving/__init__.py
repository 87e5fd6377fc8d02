"""What is served, held to what is to be served: engines and proxy under supervisord, switched without losing a request."""
