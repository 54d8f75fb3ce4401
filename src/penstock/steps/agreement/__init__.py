"""The managers of a job agree on the steps that there are, on one disk or on many."""
