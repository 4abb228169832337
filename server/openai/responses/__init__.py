"""The Responses API: items, stored responses, background responses, streaming events."""
