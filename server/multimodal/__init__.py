"""Images and videos in requests: fetching, decoding, preprocessing, and placement in the prompt.
The vision tower is in hpu/multimodal."""
