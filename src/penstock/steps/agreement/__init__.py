"""What the managers of a job agree on: which steps there are, on one disk or on many."""
