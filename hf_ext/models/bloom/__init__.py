"""BLOOM (BigScience Workshop, 2022)."""
