"""The shared blocks. They know no architecture and no configuration class."""
