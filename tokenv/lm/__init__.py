"""The autoregressive U-Net language model: encode, pool, contextualise, distribute, decode."""
