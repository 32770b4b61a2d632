"""Exchange with the Hub: official export, model cards."""
