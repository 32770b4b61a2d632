"""Marian (Junczys-Dowmunt et al., 2018)."""
