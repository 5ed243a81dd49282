"""What a user composes: the graph, transforms and resource hints. No threads, no files, no processes."""
