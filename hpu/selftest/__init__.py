"""Self-test of a card: small programs that test assumptions about the vendor's runtime."""
