"""GPT (Radford et al., 2018)."""
