"""Images on the device: vision towers, and how a decoder gets their results. A video is an image
with several time steps."""
