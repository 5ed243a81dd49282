"""When a batch leaves, and what is in it: pure decisions. Rows and the time go in, batches come out."""
