"""XLM-RoBERTa (Conneau et al., 2019)."""
