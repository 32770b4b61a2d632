"""The `hf-ext` command. `hf_ext.cli.app:main` is its entry point; one module per command."""
