"""The verifier's hidden states: how vLLM gives them away, how they lie on disk, how training reads them.

`format` (a sample, the plan of a dump), `shards` (files), `sinks` and `connector` (the way out of vLLM), `launch`
(the extracting engine).
"""
