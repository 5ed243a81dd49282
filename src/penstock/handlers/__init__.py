"""Ready-made model handlers, one file a framework. Import the one you use; nothing here imports them for you."""
