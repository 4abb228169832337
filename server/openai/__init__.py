"""OpenAI API: routes of chat, completions, responses and models; and vLLM's routes for token ids,
rendered prompts and adapters."""
