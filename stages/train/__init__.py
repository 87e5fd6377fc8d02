"""Train the drafter on the verifier's hidden states."""
