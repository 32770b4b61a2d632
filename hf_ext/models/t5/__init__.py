"""T5 (Raffel et al., 2019)."""
