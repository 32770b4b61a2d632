"""GPT-NeoX (Black et al., 2022)."""
