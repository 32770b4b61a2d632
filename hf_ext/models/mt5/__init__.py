"""mT5 (Xue et al., 2020)."""
