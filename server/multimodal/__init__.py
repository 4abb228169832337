"""Images of requests: fetched, decoded, preprocessed, and placed in the prompt.

The vision tower is in hpu/multimodal.
"""
