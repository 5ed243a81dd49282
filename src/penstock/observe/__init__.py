"""What a run tells: metrics, counts, live progress, the result."""
