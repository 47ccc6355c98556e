"""What is done with maps that are stored."""
