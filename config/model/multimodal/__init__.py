"""Multimodal models: their text model, and the settings of their vision tower."""
