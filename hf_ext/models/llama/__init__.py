"""LLaMA (Touvron et al., 2023)."""
