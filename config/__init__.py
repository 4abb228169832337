"""Settings, request parameters and the contents of checkpoints, as frozen, checked facts.

Imports nothing of the other three packages.
"""
