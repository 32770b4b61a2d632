"""mBART (Liu et al., 2020)."""
