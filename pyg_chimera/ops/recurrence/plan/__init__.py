"""What depends on the graph alone, and what algorithms cost."""
