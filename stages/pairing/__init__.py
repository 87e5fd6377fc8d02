"""Which verifier a drafter belongs to: the verifier's content identity, and the lock that ties the pair.

`identity` reads a model directory into a `VerifierIdentity`, `store` says where materialised verifiers are kept,
`lock` holds a drafter against an identity, `frozen` reads the weights that drafter and verifier share.
Only `frozen` needs torch.
"""
