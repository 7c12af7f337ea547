"""Every real peer on one node beside this project's public API."""
