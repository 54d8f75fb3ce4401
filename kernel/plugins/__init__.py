"""Which handler takes a leaf, which stage a name means, and how other distributions add to both."""
