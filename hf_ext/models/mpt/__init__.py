"""MPT (MosaicML, 2023)."""
