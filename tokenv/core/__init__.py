"""Shared definitions: TensorDict keys, contracts, errors, rates, distributed batches. Imports no other room."""

from tokenv.core import keys as keys
