"""LLM: the text pipeline without HTTP, with the engine in this process."""
