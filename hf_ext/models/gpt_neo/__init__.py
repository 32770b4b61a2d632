"""GPT-Neo (Black et al., 2021)."""
