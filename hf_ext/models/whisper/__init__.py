"""Whisper (Radford et al., 2022)."""
