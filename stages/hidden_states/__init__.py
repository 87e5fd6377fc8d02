"""The verifier's hidden states: how vLLM gives them away, how they lie on disk, how training reads them.

`format` (a sample, the plan of a dump), `shards` (files), `connector` and `writer` (the way out of vLLM), `launch`
(the extracting engine).
"""
