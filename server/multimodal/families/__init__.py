"""Prompt text of images and videos by model family: base.py has the interface, each other file a
form."""
