"""Library: greedy and sampled decoding through the engine that serves, with every verify round seen."""
