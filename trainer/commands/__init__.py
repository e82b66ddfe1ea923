"""The `mrp` command line."""
