"""The command ``maru``: one file per subcommand, on top of the store and the connector."""
