"""What a save does otherwise if several processes save together."""
