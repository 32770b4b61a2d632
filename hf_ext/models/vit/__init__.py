"""ViT (Dosovitskiy et al., 2020)."""
