"""Longformer (Beltagy et al., 2020)."""
