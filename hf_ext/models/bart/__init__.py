"""BART (Lewis et al., 2019)."""
