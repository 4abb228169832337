"""Responses API, built on the chat pipeline."""
