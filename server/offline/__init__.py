"""LLM: the text pipeline without HTTP, for offline inference."""
