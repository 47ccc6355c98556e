"""Samples to token batches: encoding and word alignment."""
