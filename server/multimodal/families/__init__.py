"""Prompt text of images and videos by model family. base.py has the interface, registry.py selects
the PromptForm of a checkpoint, and each other file has the PromptForm classes of a family, or of
families with similar prompts."""
