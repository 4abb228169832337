"""Scheduling: selects the requests of a step, their token counts and their launches."""
