"""The autoregressive U-Net language model: encoder, chunking, token-level layers, decoder, codecs."""
