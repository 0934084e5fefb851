"""What people and monitoring see: console, status, report and metrics."""
