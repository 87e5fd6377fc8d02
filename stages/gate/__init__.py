"""Stage gate: greedy decoding with the drafter is token-identical to greedy decoding without it, through vLLM."""
