"""Responses API: items, stored responses, background responses, stream events."""
