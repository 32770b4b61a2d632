"""Attention patterns, one idea a file."""
