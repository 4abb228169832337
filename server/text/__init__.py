"""Text to tokens and back, and the chat templates that turn messages into text."""
