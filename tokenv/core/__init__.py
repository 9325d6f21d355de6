"""Shared definitions: TensorDict keys, contracts, errors, rates, distributed batches. Imports no other room."""
