"""Pure decisions of the coordinator: state in, commands and reasons out."""
