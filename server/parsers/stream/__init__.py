"""What parsers are made of: events, text that comes in pieces, JSON in pieces."""
