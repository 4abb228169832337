"""Self-test of a card: assumptions about the vendor's runtime as small programs, which run on it.
Not here: processes, the stored result, and the choice of settings (engine/selftest).
"""
