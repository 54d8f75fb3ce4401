"""The output of the commands: tables and colours with rich, plain lines without it."""
