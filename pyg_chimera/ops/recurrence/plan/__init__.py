"""What depends on the graph alone, and more that several rooms read."""
