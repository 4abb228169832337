"""Draft methods of speculative decoding: settings, checkpoints and sizes of each method."""
