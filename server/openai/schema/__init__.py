"""Request bodies of the OpenAI API, as pydantic models."""
