"""DistilBERT (Sanh et al., 2019)."""
