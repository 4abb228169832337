"""Images that layers read in place of tokens: their tower, the cache of their keys and values, and
which of these the tokens of a launch see. The layers themselves are in hpu/layers/."""
