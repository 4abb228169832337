"""Images on the device: vision towers and projectors, the cache of image embeddings, and the merge
of embeddings into the tokens. Images are decoded and preprocessed in server/multimodal/."""
