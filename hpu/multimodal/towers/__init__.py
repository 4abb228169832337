"""Vision towers of transformers' models: how they are built and filled, and how each family
computes images in shapes that a device has compiled."""
