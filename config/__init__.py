"""Facts: settings, request parameters and what a checkpoint says of itself.

Read once, checked, frozen and handed down. Imports nothing of the other three packages.
"""
