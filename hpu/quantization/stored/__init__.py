"""Methods for weights that are quantized in the checkpoint."""
