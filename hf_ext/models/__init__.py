"""One folder per architecture: `configuration_<arch>.py`, `modeling_<arch>.py`."""
