"""DeiT (Touvron et al., 2020)."""
