"""CLIP (Radford et al., 2021)."""
