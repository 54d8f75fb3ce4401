"""What a save or a restore tells about itself: where the time went, in figures, words and pictures."""
