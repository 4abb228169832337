"""Images for cross-attention layers: their tower, the cache of their keys and values, and the tiles
that the tokens of a launch attend to. The layers are in hpu/layers/."""
