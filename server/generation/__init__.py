"""Generation requests: validation, submission to the engine, and output as text deltas and parser
events."""
