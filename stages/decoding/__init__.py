"""Library: greedy and sampled decoding, every verify round seen: by the engine that serves (`engine`), and by our own loop over any proposer (`loop`)."""
