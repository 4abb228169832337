"""Images on the device: vision towers and projectors, the cache of their embeddings, and how these
take the places of tokens. Decoding and preprocessing of images are in server/multimodal/."""
