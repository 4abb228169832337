"""Images for cross-attention layers: their tower and its launches, the cache of their keys and
values, and the tiles that the tokens of a launch attend to."""
