"""Self-test of a card: small programs that test assumptions about the vendor's runtime. Processes,
the stored result, and the selection of settings are in engine/selftest."""
