"""What a checkpoint may hold beside, or instead of, one tree."""
