"""Sources and sinks: how rows come in as splits, and how they go out so that no reader sees half a file."""
