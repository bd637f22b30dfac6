"""What is put into an engine's process."""
