"""What outlives a process: commits, resuming, whether it is the same run, the manifest and the status."""
