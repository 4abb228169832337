"""OpenAI API: routes of chat and completions, and their responses."""
