"""What algorithms cost on a CPU: multiply-adds, seconds and bytes."""
