"""Commands that write, delete, or compare every byte."""
