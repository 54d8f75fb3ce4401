"""Options: from a TOML file, the environment and arguments to checked values; how arrays are stored."""
