"""The `ravnest` command: one module per subcommand, and rendering."""
