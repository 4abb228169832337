"""How products of the compiled kernels depend on the number of rows."""

MOST_PACKED = 8
"""Rows up to which weights of groups are multiplied as they are, as `most_packed` in
hpu/native/quantized_integers.h. For more they are rounded to 12 bits and a sign."""
