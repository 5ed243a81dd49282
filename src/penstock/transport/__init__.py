"""What passes between processes, and how they are started."""
