"""Operating-system services: processes, and the event loop that waits for them."""
