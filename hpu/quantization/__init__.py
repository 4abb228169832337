"""Weights in few bits: how they are made, stored and multiplied."""
