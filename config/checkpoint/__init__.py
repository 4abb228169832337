"""From a model's name to a local folder: hub, GGUF conversion, the demo model.

Also checks the files against config.json before torch is imported.
"""
