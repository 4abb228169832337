"""Building blocks of parsers: events, incremental text, JSON and Python literals."""
