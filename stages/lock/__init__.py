"""Does this drafter belong to this verifier?"""
