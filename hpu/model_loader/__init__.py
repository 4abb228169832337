"""Loading of checkpoint files into parameters, and the memory that a model needs."""
