"""Resolves a model name to a local folder, and checks and reads the files of a checkpoint. Imports
no torch."""
