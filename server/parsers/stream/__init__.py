"""Building blocks of parsers: events, incremental text, incremental JSON."""
