"""Prompt text of images and videos by model family. base.py has the interface; each other file
except registry.py has the PromptForm classes of a family."""
