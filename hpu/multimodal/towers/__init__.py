"""Vision towers of transformers models: how towers are built and filled, and the implementation of
each family in fixed shapes."""
