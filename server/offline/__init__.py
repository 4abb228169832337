"""Offline inference: LLM with its inputs and outputs, calibration, and perplexity."""
