"""The commands that show and measure settings."""
