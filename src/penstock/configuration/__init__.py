"""What there is to configure, in words for people and as a schema for editors; and what holds now."""
