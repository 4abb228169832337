"""Draft methods of speculative decoding: settings, checkpoints and sizes of each method. The tensor
code of a method is in the file of the same name in hpu/spec_decode/drafters/."""
