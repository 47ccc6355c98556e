"""What each command of `ola` does and prints; every function returns its exit code."""
