"""The OpenAI API: routes of chat and completions, and how their answers are built."""
