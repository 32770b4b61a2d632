"""Swin Transformer (Liu et al., 2021)."""
