"""Data: reading the user's files, collators, packing and objectives."""
