"""Vision towers of transformers models: how towers are built and filled, and implementations of
model families in fixed shapes."""
