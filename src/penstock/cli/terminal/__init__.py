"""What the commands print: tables and colours with rich, plain lines without it."""
