"""The textbook Transformer (Vaswani et al., 2017), with every choice since then open."""
