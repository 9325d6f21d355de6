"""From symbols to tokens and back."""
