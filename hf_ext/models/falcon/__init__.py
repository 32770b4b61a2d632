"""Falcon (Almazrouei et al., 2023)."""
