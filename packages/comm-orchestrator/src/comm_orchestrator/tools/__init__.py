"""The command ``commctl`` and its subcommands; nothing outside of this package imports it."""
