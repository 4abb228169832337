"""Methods of weights that a checkpoint has quantized."""
