"""Images on the device: vision towers and projectors, the cache of image embeddings, and the merge
of embeddings into the tokens. A video is an image with several time steps. server/multimodal/
decodes and preprocesses images and videos."""
