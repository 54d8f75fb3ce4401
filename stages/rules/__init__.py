"""Rules applied to what is stored: leaves that are made from others when they are read."""
